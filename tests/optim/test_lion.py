"""`--optimizer lion` against algorithm 2 of Chen et al. 2023, element by element."""

import math
from dataclasses import replace

import torch

from nanotrain.config.config import OptimConfig
from nanotrain.optim.lion import LION
from tests.harness import ranks
from tests.optim.ranges import LR, follow_torch, param_range, step_of
from tests.optim.test_distributed import Trainee, grads_of, mean_grads
from tests.parallel.dp.toys import RESIDENT_STRATEGIES

CONFIG = OptimConfig(optimizer="lion", weight_decay=0.1, lion_beta1=0.8, lion_beta2=0.9)


class Lion(torch.optim.Optimizer):
    """The algorithm on scalars."""

    def __init__(self, param, **group):
        super().__init__([param], group)

    def step(self):
        (group,) = self.param_groups
        (param,) = group["params"]
        old = self.state[param].get("exp_avg", torch.zeros_like(param))
        weights, momenta = [], []
        for weight, grad, momentum in zip(param.tolist(), param.grad.tolist(), old.tolist(), strict=True):
            sign = math.copysign(1.0, 0.8 * momentum + 0.2 * grad)
            weights.append(weight - group["lr"] * (sign + group["weight_decay"] * weight))
            momenta.append(0.9 * momentum + 0.1 * grad)
        param.data.copy_(torch.tensor(weights))
        self.state[param]["exp_avg"] = torch.tensor(momenta)


def test_ranges_follow_the_algorithm():
    follow_torch(LION, CONFIG, Lion)


def test_zero_gradient_moves_nothing_but_by_weight_decay():
    ours = param_range(torch.tensor([0.0, 2.0]), LION.state_names(CONFIG))
    LION.update([ours], step_of(CONFIG, 1))
    torch.testing.assert_close(ours.main_param, torch.tensor([0.0, 2.0 * (1 - LR * 0.1)]))


@ranks(3, strategy="optim")
def test_shards_follow_full_tensors_in_every_strategy(ctx):
    config = replace(CONFIG, clip_grad=0.0)
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
            torch.testing.assert_close(weight.flatten(), full[name].main_param, rtol=1e-6, atol=1e-6)
