"""The configuration: fields, rules, command line and YAML files; pure, without torch.

Fields       config.py          the sections; its docstring lists their files
             option.py          declaration of a field or section
             schema.py          the fields as a table, conversion of values
Arguments    arguments.py       the arguments that exist, errors for others
             flags.py           parser of the command line: flags
             overrides.py       Hydra's forms of arguments
             command_line.py    what the parser returns
             suggest.py         what was probably meant
             help.py            texts generated from the fields
Files        compose.py         composition of YAML files (Hydra)
             recipe_files.py    one YAML file
             merge.py           settings of the command line over the files
             references.py      values from the environment
Megatron-LM  megatron.py        flags of Megatron-LM that are no field
             translate.py, conversions.py, implied.py    what they become, and what they imply
Forms        notation.py        layer patterns, layouts, numbers
             data_stages.py     stages of the data
             schedules.py       batch sizes and sequence lengths by samples
All of it    load.py            `load_config`, `configure`, `load_line`, `reply`
             rules/             rules over several fields
             tables/            flags and names of others, as YAML

It does not hold lists that grow with other packages: schedules, core attentions and optimizers are
named here by strings.
"""
