"""The optimizer step whose results do not depend on the layout, in any bit.

exact_norm          the gradient norm by sums of squares in bins, exact in any order
in_whole_vectors    an elementwise rule on ranges padded to whole vectors, as the kernels round
                    the last elements of a tensor in another way
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.kernels.exact_sums import (
    SQUARE_GRIDS,
    VECTOR_ELEMENTS,
    join_bins,
    square_bins,
)
from nanotrain.optim.rule import ParamRange, StepArithmetic, UpdateRule, UpdateStep


def _local_bins(grad_shards: Sequence[Tensor], *, device: torch.device) -> Tensor:
    """[bins] fp64 of this rank's shards."""
    total = torch.zeros(len(SQUARE_GRIDS), dtype=torch.float64, device=device)
    for shard in grad_shards:
        total += square_bins(shard)
    return total


def in_whole_vectors(rule: UpdateRule) -> UpdateRule:
    """An elementwise rule on padded copies of its ranges."""

    def update(ranges: Sequence[ParamRange], step: UpdateStep) -> None:
        padded = [_padded(part) for part in ranges]
        rule.update(padded, step)
        for part, computed in zip(ranges, padded, strict=True):
            numel = part.main_param.numel()
            part.main_param.copy_(computed.main_param[:numel])
            for name, values in part.state.items():
                values.copy_(computed.state[name][:numel])

    return replace(rule, update=update)


def _padded(part: ParamRange) -> ParamRange:
    """Copies of a range whose length is a multiple of a vector."""
    padding = -part.main_param.numel() % VECTOR_ELEMENTS
    return replace(
        part,
        main_param=F.pad(part.main_param, (0, padding)),
        grad=F.pad(part.grad, (0, padding)),
        state={name: F.pad(values, (0, padding)) for name, values in part.state.items()},
    )


EXACT_ARITHMETIC = StepArithmetic(_local_bins, join_bins, form_of=in_whole_vectors)
