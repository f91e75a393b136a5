"""The optimizer step whose results do not depend on the layout, in any bit.

EXACT_ARITHMETIC    the gradient norm by sums of squares in bins, exact in any order
in_whole_vectors    an elementwise rule on ranges padded to whole vectors, as the kernels round
                    the last elements of a tensor in another way
invariant_matrix_rule
                    a rule for matrices: directions and updates on whole vectors; a full matrix,
                    which its owner transforms at once, from an aligned address on
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.config.config import OptimConfig
from nanotrain.kernels.exact_sums import (
    SQUARE_GRIDS,
    VECTOR_ELEMENTS,
    in_one_form,
    join_bins,
    product_bins,
    square_bins,
)
from nanotrain.optim.rule import (
    MatrixArithmetic,
    MatrixRule,
    ParamRange,
    StepArithmetic,
    UpdateRule,
    UpdateStep,
)


def _local_bins(grad_shards: Sequence[Tensor], *, device: torch.device) -> Tensor:
    """[bins] fp64 of this rank's shards."""
    total = torch.zeros(len(SQUARE_GRIDS), dtype=torch.float64, device=device)
    for shard in grad_shards:
        total += square_bins(shard)
    return total


def in_whole_vectors(rule: UpdateRule) -> UpdateRule:
    """An elementwise rule on padded copies of its ranges, and its rule for matrices."""

    def update(ranges: Sequence[ParamRange], step: UpdateStep) -> None:
        padded = [_padded(part) for part in ranges]
        rule.update(padded, step)
        for part, computed in zip(ranges, padded, strict=True):
            part.main_param.copy_(computed.main_param[: part.main_param.numel()])
            _copy_state(computed, part)

    matrix = None if rule.matrix is None else invariant_matrix_rule(rule.matrix)
    return replace(rule, update=update, matrix=matrix)


def invariant_matrix_rule(rule: MatrixRule) -> MatrixRule:
    """A rule for matrices on whole vectors, and on full matrices from aligned addresses on."""

    def direction(part: ParamRange, step: UpdateStep) -> Tensor:
        padded = _padded(part)
        directions = rule.direction(padded, step)
        _copy_state(padded, part)
        return directions[: part.grad.numel()]

    def transform(full: Tensor, config: OptimConfig) -> Tensor:
        assert rule.transform is not None, "matrices are sent to be transformed"
        return rule.transform(in_one_form(full), config)

    return replace(
        rule,
        direction=direction,
        transform=None if rule.transform is None else transform,
        arithmetic=MatrixArithmetic(_add_scaled, product_bins, join=join_bins),
    )


def _add_scaled(main: Tensor, update: Tensor, *, factor: float) -> None:
    """Add a scaled update on whole vectors."""
    numel = main.numel()
    padding = -numel % VECTOR_ELEMENTS
    total = F.pad(main, (0, padding)).add_(F.pad(update, (0, padding)), alpha=factor)
    main.copy_(total[:numel])


def _copy_state(source: ParamRange, target: ParamRange) -> None:
    """Copy the state of a padded range back."""
    for name, values in target.state.items():
        values.copy_(source.state[name][: values.numel()])


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
