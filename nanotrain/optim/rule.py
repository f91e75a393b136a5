"""The interface of an update rule: which state it keeps and how it is built over param ranges of flat shards."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from nanotrain.config.config import OptimConfig


@dataclass(frozen=True)
class ParamRange:
    """Main params that are updated together: consecutive elements of a shard with the same weight decay."""

    # fp32, 1-D, or of the parameter's local shape where the rule needs the whole matrix; `.grad` is set
    main_param: Tensor
    state: Mapping[str, Tensor]  # state tensors by name, of the same shape; views of flat state
    weight_decay: bool  # whether weight decay applies


class Optimizer(Protocol):
    """What a step needs of a torch.optim.Optimizer."""

    param_groups: list[dict[str, Any]]  # "lr" is set before each step
    state: Any  # param -> state tensors by name; "step" counts the updates where the rule depends on it

    def step(self) -> Any:
        """Update the params of all groups from their `.grad`."""


@dataclass(frozen=True)
class UpdateRule:
    """One row of `OPTIMIZERS`."""

    state_names: tuple[str, ...]  # fp32 state tensors per element of the main params; they are part of checkpoints
    # builds an optimizer over param ranges whose state tensors are those of the ranges
    build: Callable[[Sequence[ParamRange], OptimConfig], Optimizer]
    # the update of an element depends on its whole matrix, so matrices are not sharded or merged
    needs_whole_matrix: bool = False


def param_groups(ranges: Sequence[ParamRange], weight_decay: float) -> list[dict[str, Any]]:
    """torch param groups: ranges with weight decay, then ranges without; empty groups are left out."""
    groups: list[dict[str, Any]] = []
    for decays, value in ((True, weight_decay), (False, 0.0)):
        params = [part.main_param for part in ranges if part.weight_decay is decays]
        if params:
            groups.append({"params": params, "weight_decay": value})
    return groups
