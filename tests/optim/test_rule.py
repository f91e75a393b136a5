"""Param groups of param ranges."""

import torch

from nanotrain.optim.rule import ParamRange, param_groups


def test_param_groups_split_by_weight_decay_and_leave_out_empty_groups():
    decayed, plain = (ParamRange(torch.zeros(3), {}, decays) for decays in (True, False))
    both = param_groups([plain, decayed], 0.1)
    assert [group["weight_decay"] for group in both] == [0.1, 0.0]
    assert all(group["params"][0] is part.main_param for group, part in zip(both, (decayed, plain), strict=True))
    assert [group["weight_decay"] for group in param_groups([plain], 0.1)] == [0.0]
