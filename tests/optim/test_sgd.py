"""`--optimizer sgd` is torch's SGD, with and without momentum."""

import pytest
import torch

from nanotrain.config.config import OptimConfig
from nanotrain.optim.sgd import SGD
from tests.optim.ranges import follow_torch


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_ranges_follow_torch(momentum):
    config = OptimConfig(optimizer="sgd", weight_decay=0.1, sgd_momentum=momentum)
    follow_torch(SGD, config, lambda param, **group: torch.optim.SGD([param], momentum=momentum, **group))


def test_without_momentum_there_is_no_state():
    assert SGD.state_names(OptimConfig(sgd_momentum=0.0)) == ()
    assert SGD.state_names(OptimConfig(sgd_momentum=0.9)) == ("momentum_buffer",)
