"""The table of update rules: the values of `--optimizer`. A new rule is one file and one row."""

from nanotrain.optim.adam import ADAM
from nanotrain.optim.lion import LION
from nanotrain.optim.muon import MUON
from nanotrain.optim.rule import UpdateRule
from nanotrain.optim.sgd import SGD

OPTIMIZERS: dict[str, UpdateRule] = {
    "adam": ADAM,
    "sgd": SGD,
    "lion": LION,
    "muon": MUON,
}
