"""The table of update rules: the values of `--optimizer`. A new rule is one file and one row."""

from nanotrain.optim.elementwise import ADAM, LION, SGD
from nanotrain.optim.muon import MUON
from nanotrain.optim.rule import UpdateRule

OPTIMIZERS: dict[str, UpdateRule] = {
    "adam": ADAM,
    "sgd": SGD,
    "lion": LION,
    "muon": MUON,
}
