"""AdamW from torch, on stretches of flat shards (Loshchilov & Hutter 2019)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanotrain.config.config import OptimConfig

STATE_NAMES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Stretch:
    """A run of neighbouring elements of a shard that are updated alike.

    Attributes:
        weight: main weights, 1-D fp32; its `.grad` is set.
        state: the moments by name, views of the same elements of the flat state.
        decays: whether weight decay applies.
    """

    weight: Tensor
    state: Mapping[str, Tensor]
    decays: bool


def build_adamw(stretches: Sequence[Stretch], config: OptimConfig) -> torch.optim.AdamW:
    """A fused AdamW over stretches, its state laid into theirs.

    The state exists from the start, so memory does not grow at the first step and a checkpoint can be read into it.
    """
    groups = [
        {"params": [s.weight for s in stretches if s.decays is decays], "weight_decay": weight_decay}
        for decays, weight_decay in ((True, config.weight_decay), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        fused=True,
    )
    for stretch in stretches:
        step = torch.zeros((), dtype=torch.float32, device=stretch.weight.device)
        optimizer.state[stretch.weight] = {"step": step, **stretch.state}
    return optimizer


def set_step(optimizer: torch.optim.AdamW, step: int) -> None:
    """Tell the optimizer how many updates are behind it (its bias correction needs to know)."""
    for state in optimizer.state.values():
        state["step"].fill_(step)
