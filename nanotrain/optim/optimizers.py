"""The table of update rules: the values of `--optimizer`. A new rule is one file and one row."""

from nanotrain.optim.adam import ADAM
from nanotrain.optim.rule import UpdateRule

OPTIMIZERS: dict[str, UpdateRule] = {
    "adam": ADAM,
}
