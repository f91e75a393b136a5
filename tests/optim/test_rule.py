"""Param groups of param ranges, and the factors of their rates."""

from dataclasses import replace

import pytest
import torch

from nanotrain.config.config import OptimConfig
from nanotrain.optim.rule import UpdateStep, param_groups, width_factors
from tests.optim.ranges import param_range

Factors = tuple[float, float]
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


@pytest.mark.parametrize(
    ("optimizer", "matrix", "vector"),
    [("adam", (0.25, 0.25), (1, 1)), ("lion", (0.25, 0.25), (1, 1)), ("sgd", (1, 1), (4, 1))],
)
def test_factors_of_a_wider_model(optimizer: str, matrix: Factors, vector: Factors) -> None:
    part = replace(param_range(torch.zeros(3), ()), width_multiplier=4.0)
    assert width_factors(replace(part, follows_width=True), optimizer) == matrix
    assert width_factors(part, optimizer) == vector
    assert width_factors(replace(part, width_multiplier=1.0), optimizer) == (1, 1)


def test_groups_have_factors_of_the_learning_rate_and_of_epsilon() -> None:
    vector = replace(param_range(torch.zeros(3), ()), width_multiplier=4.0)
    matrix = replace(vector, follows_width=True)
    group, narrow = param_groups([vector, matrix], STEP)
    assert (group.lr, group.adam_eps) == (1.0, STEP.config.adam_eps)
    assert (narrow.lr, narrow.adam_eps) == (0.25, 0.25 * STEP.config.adam_eps)
    decoupled = replace(matrix, is_decoupled=True)
    assert STEP.lr_of(decoupled) == 0.5
    assert replace(STEP, decoupled_lr=None).lr_of(decoupled) == 0.25
