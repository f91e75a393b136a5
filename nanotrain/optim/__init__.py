"""Optimization: update rules, the distributed optimizer, clipping, learning-rate schedules.

    rule.py, elementwise.py, muon.py    the interface of update rules, and the rules
    normuon.py, hyperball.py            rules for matrices beyond Muon
    newton_schulz.py, gram_newton_schulz.py
                                        Muon's iterations
    matrices.py, matrix_routes.py       hidden matrices: their owners, and the way to them
    matrix_update.py, heads.py          the update of matrices, and of the heads of a projection
    whole_matrix_state.py, fixed_norm.py
                                        state per matrix, and updates that keep its norm
    invariant.py                        the arithmetic of a step, exact in any layout
    state.py, stored.py, offload.py     state of a shard, its dtypes, state in host memory
    distributed.py                      the distributed optimizer
    sharded_module.py                   data parallelism and this optimizer for any torch module
    lr.py                               schedules of learning rate and weight decay

It holds main params and optimizer state; buffers, gradient reduction and the parameter all-gather
are in `nanotrain.parallel.dp`.

OPTIMIZERS holds the update rules, by the values of `--optimizer`. A new rule is one file and one
row.
"""

from nanotrain.optim.elementwise import ADAM, LION, SGD
from nanotrain.optim.hyperball import ADAM_H, MUON_H
from nanotrain.optim.muon import MUON
from nanotrain.optim.normuon import NORMUON
from nanotrain.optim.rule import UpdateRule

OPTIMIZERS: dict[str, UpdateRule] = {
    "adam": ADAM,
    "sgd": SGD,
    "lion": LION,
    "muon": MUON,
    "normuon": NORMUON,
    "muon_h": MUON_H,
    "adam_h": ADAM_H,
}
