"""`--optimizer adam` on param ranges of flat shards is torch's AdamW on global tensors."""

import math
from dataclasses import replace

import pytest
import torch

from nanotrain.config.config import OptimConfig
from nanotrain.optim.elementwise import ADAM, LION, SGD, update_adam
from tests.harness import ranks
from tests.optim.ranges import LR, follow_torch, param_range, step_of
from tests.optim.test_distributed import Trainee, grads_of, mean_grads
from tests.parallel.dp.toys import RESIDENT_STRATEGIES

ADAM_CONFIG = OptimConfig(lr=1e-2, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-6)


def test_ranges_follow_torch_with_and_without_weight_decay_and_with_a_decoupled_lr():
    follow_torch(
        ADAM,
        ADAM_CONFIG,
        lambda param, **group: torch.optim.AdamW([param], betas=(0.8, 0.9), eps=1e-6, **group),
    )


def test_bias_correction_continues_from_the_number_of_the_update():
    # Given one range that took a step and one whose state was copied,
    names = ADAM.state_names(ADAM_CONFIG)
    first, second = (
        param_range(torch.ones(5), names, grad=torch.full((5,), 2.0)) for _ in range(2)
    )
    update_adam([first], step_of(ADAM_CONFIG, 1))
    second.main_param.copy_(first.main_param)
    for name in names:
        second.state[name].copy_(first.state[name])
    # when both take the second, they are equal to the bit, and unlike a first one.
    for part in (first, second):
        update_adam([part], step_of(ADAM_CONFIG, 2))
    assert torch.equal(first.main_param, second.main_param)
    update_adam([second], step_of(ADAM_CONFIG, 1))
    update_adam([first], step_of(ADAM_CONFIG, 3))
    assert not torch.equal(first.main_param, second.main_param)


def test_zero_gradient_and_zero_weight_stay_zero():
    # Gaps and padding are updated along with what lies around them.
    ours = param_range(torch.zeros(9), ADAM.state_names(ADAM_CONFIG))
    for number in range(1, 4):
        update_adam([ours], step_of(ADAM_CONFIG, number))
    assert not ours.main_param.any()


LION_CONFIG = OptimConfig(optimizer="lion", weight_decay=0.1, lion_beta1=0.8, lion_beta2=0.9)


class Lion(torch.optim.Optimizer):
    """The algorithm on scalars."""

    def __init__(self, param, **group):
        super().__init__([param], group)

    def step(self):
        (group,) = self.param_groups
        (param,) = group["params"]
        old = self.state[param].get("exp_avg", torch.zeros_like(param))
        weights, momenta = [], []
        for weight, grad, momentum in zip(
            param.tolist(), param.grad.tolist(), old.tolist(), strict=True
        ):
            sign = math.copysign(1.0, 0.8 * momentum + 0.2 * grad)
            weights.append(weight - group["lr"] * (sign + group["weight_decay"] * weight))
            momenta.append(0.9 * momentum + 0.1 * grad)
        param.data.copy_(torch.tensor(weights))
        self.state[param]["exp_avg"] = torch.tensor(momenta)


def test_ranges_follow_the_algorithm():
    follow_torch(LION, LION_CONFIG, Lion)


def test_zero_gradient_moves_nothing_but_by_weight_decay():
    ours = param_range(torch.tensor([0.0, 2.0]), LION.state_names(LION_CONFIG))
    LION.update([ours], step_of(LION_CONFIG, 1))
    torch.testing.assert_close(ours.main_param, torch.tensor([0.0, 2.0 * (1 - LR * 0.1)]))


@ranks(3, strategy="optim", shares=True)
def test_shards_follow_full_tensors_in_every_strategy(ctx):
    config = replace(LION_CONFIG, clip_grad=0.0)
    for strategy in RESIDENT_STRATEGIES:
        trainee = Trainee(ctx, strategy, config=config)
        full = {
            name: param_range(weight.flatten(), ("exp_avg",), decays=weight.ndim > 1)
            for name, weight in trainee.weights().items()
        }
        for step in range(3):
            trainee.step(mean_grads(ctx, step), lr=LR)  # those of rank 0, zero on the others
            for name, grad in grads_of(0, step).items():
                full[name].grad.copy_(grad.flatten())
            LION.update(list(full.values()), step_of(config, step + 1))
        for name, weight in trainee.weights().items():
            torch.testing.assert_close(
                weight.flatten(), full[name].main_param, rtol=1e-6, atol=1e-6
            )


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_ranges_follow_torch(momentum):
    config = OptimConfig(optimizer="sgd", weight_decay=0.1, sgd_momentum=momentum)
    follow_torch(
        SGD, config, lambda param, **group: torch.optim.SGD([param], momentum=momentum, **group)
    )


def test_without_momentum_there_is_no_state():
    assert SGD.state_names(OptimConfig(sgd_momentum=0.0)) == ()
    assert SGD.state_names(OptimConfig(sgd_momentum=0.9)) == ("momentum_buffer",)
