"""Param groups of param ranges."""

import torch

from nanotrain.config.config import OptimConfig
from nanotrain.optim.rule import UpdateStep, param_groups
from tests.optim.ranges import param_range

STEP = UpdateStep(
    OptimConfig(weight_decay=0.1), torch.tensor(1.0), 1.0, 0.5, 0.1, found_inf=torch.tensor(0.0)
)


def test_param_groups_split_by_weight_decay_and_learning_rate_and_leave_out_empty_groups():
    decayed, plain = (param_range(torch.zeros(3), (), decays=decays) for decays in (True, False))
    embedding = param_range(torch.zeros(3), (), is_decoupled=True)
    groups = param_groups([plain, embedding, decayed], STEP)
    assert [(group.weight_decay, group.lr) for group in groups] == [
        (0.1, 1.0),
        (0.1, 0.5),
        (0.0, 1.0),
    ]
    for group, part in zip(groups, (decayed, embedding, plain), strict=True):
        assert group.main_params[0] is part.main_param and group.grads[0] is part.grad
    assert [group.weight_decay for group in param_groups([plain], STEP)] == [0.0]
