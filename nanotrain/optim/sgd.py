"""`--optimizer sgd`: SGD with momentum from torch, fused; weight decay is added to the gradient, as in Megatron-LM."""

from collections.abc import Sequence

from torch.optim.sgd import sgd

from nanotrain.config.config import OptimConfig
from nanotrain.optim.rule import ParamRange, UpdateRule, UpdateStep, param_groups


def state_names(config: OptimConfig) -> tuple[str, ...]:
    """Without momentum there is no state."""
    return ("momentum_buffer",) if config.sgd_momentum else ()


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
            grad_scale=step.grad_scale,
            found_inf=step.found_inf,
        )


SGD = UpdateRule(state_names=state_names, update=update_sgd, divides_by_grad_scale=True)
