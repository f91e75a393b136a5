"""The configuration: fields, rules, command line and YAML files; pure, without torch.

config.py, model.py, parallel.py   the fields, one frozen dataclass per section
option.py        declaration of a field or section        schema.py        the fields as a table, conversion of values
arguments.py     the arguments, errors for wrong ones     flags.py         parser of the command line
compose.py       composition of YAML files (Hydra)        references.py    values from the environment
load.py          `load_config`, `load_line`, `reply`      help.py          texts generated from the fields
megatron.py      flags of Megatron-LM that are no field   conversions.py, translate.py   what they become
notation.py      settings with a form of their own        schedules.py     batch sizes and sequence lengths by samples
suggest.py       what was probably meant                  rules/           rules over several fields
tables/          rules and names of others, as YAML

It does not hold lists that grow with other packages: schedules, core attentions, optimizers are
named here by strings.
"""
