"""`--optimizer adam`: AdamW from torch (Loshchilov & Hutter 2019), over param ranges of flat shards."""

from collections.abc import Sequence

import torch

from nanotrain.config.config import OptimConfig
from nanotrain.optim.rule import ParamRange, UpdateRule, param_groups


def build_adam(ranges: Sequence[ParamRange], config: OptimConfig) -> torch.optim.AdamW:
    """Build a fused AdamW whose exp_avg and exp_avg_sq are the state tensors of the ranges.

    The state exists before the first step, so that memory does not grow there and a checkpoint can be read into it.
    """
    optimizer = torch.optim.AdamW(
        param_groups(ranges, config.weight_decay),
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        fused=True,
    )
    for part in ranges:
        step = torch.zeros((), dtype=torch.float32, device=part.main_param.device)
        optimizer.state[part.main_param] = {"step": step, **part.state}
    return optimizer


ADAM = UpdateRule(state_names=("exp_avg", "exp_avg_sq"), build=build_adam)
