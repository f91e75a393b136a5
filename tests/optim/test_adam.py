"""`--optimizer adam` on param ranges of flat shards is torch's AdamW on global tensors."""

import torch

from nanotrain.config.config import OptimConfig
from nanotrain.optim.adam import ADAM, update_adam
from tests.optim.ranges import follow_torch, param_range, step_of

CONFIG = OptimConfig(lr=1e-2, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-6)


def test_ranges_follow_torch_with_and_without_weight_decay_and_with_a_decoupled_lr():
    follow_torch(ADAM, CONFIG, lambda param, **group: torch.optim.AdamW([param], betas=(0.8, 0.9), eps=1e-6, **group))


def test_bias_correction_continues_from_the_number_of_the_update():
    # Given one range that took a step and one whose state was copied,
    names = ADAM.state_names(CONFIG)
    first, second = (param_range(torch.ones(5), names, grad=torch.full((5,), 2.0)) for _ in range(2))
    update_adam([first], step_of(CONFIG, 1))
    second.main_param.copy_(first.main_param)
    for name in names:
        second.state[name].copy_(first.state[name])
    # when both take the second, they are equal to the bit, and unlike a first one.
    for part in (first, second):
        update_adam([part], step_of(CONFIG, 2))
    assert torch.equal(first.main_param, second.main_param)
    update_adam([second], step_of(CONFIG, 1))
    update_adam([first], step_of(CONFIG, 3))
    assert not torch.equal(first.main_param, second.main_param)


def test_zero_gradient_and_zero_weight_stay_zero():
    # Gaps and padding are updated along with what lies around them.
    ours = param_range(torch.zeros(9), ADAM.state_names(CONFIG))
    for number in range(1, 4):
        update_adam([ours], step_of(CONFIG, number))
    assert not ours.main_param.any()
