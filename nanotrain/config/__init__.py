"""The configuration: fields, rules, command line and YAML files; pure, without torch.

config.py     the fields, one frozen dataclass per section    derive.py     values that follow from other fields
pattern.py    patterns of layers                              option.py     declaration of a field or section
schema.py     the fields as a table, conversion of values     flags.py      parser of the command line
arguments.py  the arguments, and errors for wrong ones        suggest.py    what was probably meant
compose.py    composition of YAML files (Hydra)               load.py       `load_config`, `load_line`, `reply`
megatron.py   flags of Megatron-LM that are no field          translate.py  what they become
rules/        rules over several fields, as tables            validate.py   check of a configuration against them
help.py       texts generated from the fields                 tables/       names of others, as YAML

It does not hold lists that grow with other packages: schedules, core attentions, optimizers are named here by strings.
"""
