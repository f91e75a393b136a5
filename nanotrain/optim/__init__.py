"""Optimization: update rules, the distributed optimizer that applies one to shards, clipping,
learning-rate schedules.

It holds main params and optimizer state; buffers, gradient reduction and the parameter all-gather
are in `nanotrain.parallel.dp`.

OPTIMIZERS holds the update rules, by the values of `--optimizer`. A new rule is one file and one
row.
"""

from nanotrain.optim.elementwise import ADAM, LION, SGD
from nanotrain.optim.muon import MUON
from nanotrain.optim.rule import UpdateRule

OPTIMIZERS: dict[str, UpdateRule] = {"adam": ADAM, "sgd": SGD, "lion": LION, "muon": MUON}
