"""`--optimizer muon_h` and `adam_h`: Muon's or Adam's update of matrices with fixed norms.

`fixed_norm.py` has the update. Other parameters follow `--muon-scalar-optimizer` or AdamW, with
weight decay.
"""

from dataclasses import replace

import torch
from torch import Tensor

from nanotrain.optim.elementwise import ADAM
from nanotrain.optim.muon import MUON, MUON_MATRIX
from nanotrain.optim.rule import MatrixRule, ParamRange, UpdateRule, UpdateStep, WholeMatrixState

RADIUS = WholeMatrixState("weight_norm", lambda shape: 1, is_replicated=True)


def adam_direction(part: ParamRange, step: UpdateStep) -> Tensor:
    """Update exp_avg and exp_avg_sq; returns [n], Adam's update without the learning rate.

    In a skipped step the gradient is exp_avg, which then stays as it is.
    """
    config = step.config
    device = part.grad.device
    exp_avg = part.state["exp_avg"]
    exp_avg_sq = part.state["exp_avg_sq"]
    applied = (1.0 - step.found_inf).to(device)
    exp_avg.lerp_(part.grad, 1.0 - config.adam_beta1)
    exp_avg_sq.lerp_(part.grad.square(), (1.0 - config.adam_beta2) * applied)
    # 0 if the first step is skipped
    number = (step.number.double() - part.first_update).clamp(min=1.0).to(device)
    unbiased_avg = exp_avg / (1.0 - config.adam_beta1**number).float()
    unbiased_sq = exp_avg_sq / (1.0 - config.adam_beta2**number).float()
    return unbiased_avg / (unbiased_sq.sqrt() + config.adam_eps)


MUON_H = replace(
    MUON,
    matrix=replace(MUON_MATRIX, scale=lambda shape, config: 1.0, state=RADIUS, fixes_norm=True),
)
ADAM_H = UpdateRule(
    state_names=ADAM.state_names,
    update=ADAM.update,
    matrix=MatrixRule(
        state_names=("exp_avg", "exp_avg_sq"),
        direction=adam_direction,
        momentum="exp_avg",
        transform=None,
        scale=lambda shape, config: 1.0,
        flops=lambda shape, config: shape[0] * shape[1],
        dtype=lambda config: torch.float32,
        state=RADIUS,
        fixes_norm=True,
    ),
)
