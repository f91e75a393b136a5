"""`--optimizer adam`: AdamW from torch (Loshchilov & Hutter 2019), fused."""

from collections.abc import Sequence

from torch.optim.adamw import adamw

from nanotrain.optim.rule import ParamRange, UpdateRule, UpdateStep, param_groups


def update_adam(ranges: Sequence[ParamRange], step: UpdateStep) -> None:
    """Update exp_avg, exp_avg_sq and the main params."""
    config = step.config
    for group in param_groups(ranges, step):
        # torch increments one counter per tensor before it uses it.
        num_before = (step.number - 1.0).repeat(len(group.ranges))
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
            eps=config.adam_eps,
            maximize=False,
            grad_scale=step.grad_scale,
            found_inf=step.found_inf,
        )


ADAM = UpdateRule(state_names=lambda config: ("exp_avg", "exp_avg_sq"), update=update_adam, divides_by_grad_scale=True)
