"""What was asked for, from the command line and YAML files; pure, and without torch.

config.py   the fields, one frozen dataclass per section        derive.py    sizes that follow from them
pattern.py  which layers are of a kind                          count.py     numbers of parameters
option.py   how a field is declared                             schema.py    the fields as a table; values in and out
flags.py    words of a command line -> data                     compose.py   YAML files -> values (Hydra lives here)
load.py     all of it: `load_config`, `explain`, `to_yaml`       validate.py  rules that span fields
model_rules.py, layout_rules.py  rules of the model and its layout
idle.py     settings that would do nothing                      idle_rules.py which they are
help.py, document.py  text made from the fields
"""
