"""`--optimizer lion`: the sign of an interpolated momentum, with decoupled weight decay (Chen et al. 2023, alg. 2)."""

from collections.abc import Sequence

import torch

from nanotrain.optim.rule import ParamRange, UpdateRule, UpdateStep, param_groups


def update_lion(ranges: Sequence[ParamRange], step: UpdateStep) -> None:
    """Update exp_avg and the main params; torch has no fused kernel for this rule."""
    config, applied = step.config, 1.0 - step.found_inf
    for group in param_groups(ranges, step):
        params, grads, exp_avgs = group.main_params, group.grads, group.state("exp_avg")
        for grad, exp_avg in zip(grads, exp_avgs, strict=True):
            torch.where(step.is_skipped, exp_avg, grad, out=grad)  # then no lerp changes exp_avg
        directions = torch._foreach_lerp(exp_avgs, grads, 1.0 - config.lion_beta1)
        torch._foreach_sign_(directions)
        torch._foreach_mul_(directions, applied)
        torch._foreach_mul_(params, (1.0 - group.lr * group.weight_decay * applied.double()).float())
        torch._foreach_add_(params, directions, alpha=-group.lr)
        torch._foreach_lerp_(exp_avgs, grads, 1.0 - config.lion_beta2)


LION = UpdateRule(state_names=lambda config: ("exp_avg",), update=update_lion)
