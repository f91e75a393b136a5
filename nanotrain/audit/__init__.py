"""What a launch script of Megatron-LM asks for, and where that goes wrong.

shell_words.py, shell_values.py     words of a shell script, and the values in them
shell_tests.py, shell_script.py     its conditions and commands, followed as text and never run
sources.py                          arguments of a script, a list, a file or a checkpoint
arguments.py                        flags with their values, and conditions over them
known_bugs.py, known_bugs.yaml      bugs of versions of Megatron-LM
refusals.yaml                       combinations of flags that Megatron-LM refuses or ignores
meaning.py                          what the flags mean here: model, layout, memory and time
report.py                           the audit as text and as plain values

It starts nothing and imports nothing of Megatron-LM.
"""
