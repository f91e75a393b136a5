"""Elementwise update rules: AdamW and SGD from torch, fused; Lion.

A rule is one function and one row. It updates state and main params of ranges in place, unless the
step is skipped.
"""

from collections.abc import Sequence

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from nanotrain.config.config import OptimConfig
from nanotrain.optim.rule import ParamRange, UpdateRule, UpdateStep, param_groups


def update_adam(ranges: Sequence[ParamRange], step: UpdateStep) -> None:
    """Update exp_avg, exp_avg_sq and the main params."""
    config = step.config
    for group in param_groups(ranges, step):
        # torch increments one counter per tensor before it uses it.
        num_before = (step.number - 1.0 - group.first_update).repeat(len(group.ranges))
        adamw(
            group.main_params,
            group.grads,
            group.state("exp_avg"),
            group.state("exp_avg_sq"),
            [],
            list(num_before.unbind()),
            fused=True,
            amsgrad=False,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            lr=group.lr,
            weight_decay=group.weight_decay,
            eps=group.adam_eps,
            maximize=False,
            found_inf=step.found_inf,
        )


ADAM = UpdateRule(state_names=lambda config: ("exp_avg", "exp_avg_sq"), update=update_adam)


def update_lion(ranges: Sequence[ParamRange], step: UpdateStep) -> None:
    """Update exp_avg and the main params; torch has no fused kernel for this rule."""
    config = step.config
    applied = 1.0 - step.found_inf
    for group in param_groups(ranges, step):
        params = group.main_params
        grads = group.grads
        exp_avgs = group.state("exp_avg")
        for grad, exp_avg in zip(grads, exp_avgs, strict=True):
            torch.where(step.is_skipped, exp_avg, grad, out=grad)  # then no lerp changes exp_avg
        directions = torch._foreach_lerp(exp_avgs, grads, 1.0 - config.lion_beta1)
        torch._foreach_sign_(directions)
        torch._foreach_mul_(directions, applied)
        decay = 1.0 - group.lr * group.weight_decay * applied.double()
        torch._foreach_mul_(params, decay.float())
        torch._foreach_add_(params, directions, alpha=-group.lr)
        torch._foreach_lerp_(exp_avgs, grads, 1.0 - config.lion_beta2)


LION = UpdateRule(state_names=lambda config: ("exp_avg",), update=update_lion)


def update_sgd(ranges: Sequence[ParamRange], step: UpdateStep) -> None:
    """Update the momentum buffer and the main params."""
    momentum = step.config.sgd_momentum
    for group in param_groups(ranges, step):
        # A buffer of zeros gives torch's first step, which copies the gradient.
        buffers = group.state("momentum_buffer") if momentum else [None] * len(group.ranges)
        sgd(
            group.main_params,
            group.grads,
            list(buffers),
            fused=True,
            weight_decay=group.weight_decay,
            momentum=momentum,
            lr=group.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            found_inf=step.found_inf,
        )


def sgd_state_names(config: OptimConfig) -> tuple[str, ...]:
    """Names of SGD's state: `momentum_buffer` if momentum is set, else none."""
    return ("momentum_buffer",) if config.sgd_momentum else ()


SGD = UpdateRule(state_names=sgd_state_names, update=update_sgd)
