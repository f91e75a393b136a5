"""The interface of an update rule: which state it keeps and how it is built over param ranges of flat shards."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanotrain.config.config import OptimConfig


@dataclass(frozen=True)
class ParamRange:
    """Main params that are updated together: consecutive elements of a shard with the same weight decay.

    Attributes:
        main_param: fp32, 1-D, or of the parameter's local shape where the rule needs the whole matrix; `.grad` is set.
        state: state tensors by name, of the same shape; views of flat state.
        weight_decay: whether weight decay applies.
    """

    main_param: Tensor
    state: Mapping[str, Tensor]
    weight_decay: bool


@dataclass(frozen=True)
class UpdateRule:
    """One row of `OPTIMIZERS`.

    Attributes:
        state_names: fp32 state tensors per element of the main params; they are part of checkpoints.
        build: makes a torch optimizer over param ranges whose state tensors are those of the ranges.
        needs_whole_matrix: the update of an element depends on its whole matrix, so matrices are not sharded or merged.
    """

    state_names: tuple[str, ...]
    build: Callable[[Sequence[ParamRange], OptimConfig], torch.optim.Optimizer]
    needs_whole_matrix: bool = False


def param_groups(ranges: Sequence[ParamRange], weight_decay: float) -> list[dict[str, object]]:
    """torch param groups: ranges with weight decay, then ranges without; empty groups are left out."""
    groups: list[dict[str, object]] = []
    for decays, value in ((True, weight_decay), (False, 0.0)):
        params = [part.main_param for part in ranges if part.weight_decay is decays]
        if params:
            groups.append({"params": params, "weight_decay": value})
    return groups
