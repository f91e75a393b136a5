"""fp8 products of the forward in pieces, beside the transfers of sequence parallelism.

    can_overlap       whether pieces have the scales of the whole product, in a recipe
    gather_scaled     all-gather of an input in fp8 along the sequence, then its products
    scatter_scaled    a product of partial sums, then their reduce-scatter along the sequence

The order of products and transfers is that of overlap.py. A rank casts its own tokens, with a scale
per tensor that all ranks share or a scale per token, so an input is sent in one byte per value.
Scales of blocks have layouts that depend on the number of rows, and torch's operators do not take
them. Gradients are gathered and reduced as a whole.

torch.ops.symm_mem.fused_all_gather_scaled_matmul and fused_scaled_matmul_reduce_scatter do the same
over symmetric memory, where matrices have whole units of 16 values.

    B batch   S sequence   I inputs   O outputs
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanotrain.comm.group import Group
from nanotrain.comm.pieces import start_shift
from nanotrain.comm.symmetric_memory import group_name
from nanotrain.kernels.fp8.quantize import Quantized
from nanotrain.kernels.fp8.scaled_mm import ALIGNMENT, scaled_mm
from nanotrain.parallel.tp.region import SEQUENCE
from nanotrain.precision.fp8 import PER_ROW, Recipe


def can_overlap(recipe: Recipe) -> bool:
    """Whether a product has one scale per tensor or per row of both matrices."""
    return recipe.block[1] is None


def gather_scaled(
    name: str,
    x: Quantized,
    *,
    batch: int,
    weights: Sequence[Quantized],
    group: Group,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Gather an input along the sequence and multiply it: one [B, S, O] per weight.

    Args:
        name: key of `OVERLAPS`.
        x: [B * S/tp, I], the tokens of this rank.
        batch: B.
        weights: [O, I] of this rank.
        group: the tp group.
        dtype: dtype of the outputs.
    """
    if name == "symmetric" and all(_is_aligned(weight) for weight in weights):
        return _gather_symmetric(x, batch=batch, weights=weights, group=group, dtype=dtype)
    length = len(x.values) // batch
    pieces = []
    for distance in range(1, group.size):
        pieces.append(_start_piece(x, group, distance=distance))
    outputs = []
    for weight in weights:
        shape = (batch, group.size * length, len(weight.values))
        outputs.append(torch.empty(shape, dtype=dtype, device=x.values.device))
    for distance in range(group.size):
        piece = x
        if distance:
            works = pieces[distance - 1]
            piece = _wait_piece(works, x)
        first = (group.index + distance) % group.size * length
        for weight, output in zip(weights, outputs, strict=True):
            product = scaled_mm(piece, weight, dtype=dtype, is_fast=True)
            output[:, first : first + length] = product.view(batch, length, -1)
    return tuple(outputs)


def scatter_scaled(
    name: str, x: Quantized, *, batch: int, weight: Quantized, group: Group, dtype: torch.dtype
) -> Tensor:
    """[B * S, I], [O, I] -> the sum of the ranks' products, [B, S/tp, O] of this rank's tokens."""
    if name == "symmetric" and _is_aligned(weight):
        return _scatter_symmetric(x, batch=batch, weight=weight, group=group, dtype=dtype)
    options: dict[str, Any] = {"batch": batch, "group": group, "dtype": dtype}
    pieces = []
    for distance in range(1, group.size):
        partial_sum = _multiply_part(x, weight, distance=distance, **options)
        pieces.append(start_shift(partial_sum, group, distance=-distance, op="reduce_scatter"))
    own = _multiply_part(x, weight, distance=0, **options)
    by_rank = [own] * group.size
    for distance, piece in enumerate(pieces, start=1):
        by_rank[(group.index - distance) % group.size] = piece.wait()
    return torch.stack(by_rank).sum(0)


def _start_piece(x: Quantized, group: Group, *, distance: int) -> list[Any]:
    """Start to receive the values of a rank, and its scales where each token has one."""
    sent = [x.values.view(torch.uint8).contiguous()]
    if x.block == PER_ROW:
        sent.append(x.inverse_scales.contiguous())
    return [start_shift(tensor, group, distance=distance, op="all_gather") for tensor in sent]


def _wait_piece(works: Sequence[Any], x: Quantized) -> Quantized:
    """The tokens of another rank, in the dtype and with the blocks of this rank's."""
    values, *scales = [work.wait() for work in works]
    inverse_scales = scales[0] if scales else x.inverse_scales
    return Quantized(values.view(x.values.dtype), inverse_scales, x.block)


def _multiply_part(
    x: Quantized,
    weight: Quantized,
    *,
    batch: int,
    distance: int,
    group: Group,
    dtype: torch.dtype,
) -> Tensor:
    """[B, S/tp, O], the product of the tokens that the rank at a distance keeps."""
    index = (group.index + distance) % group.size
    values = _tokens_of_rank(x.values.view(torch.uint8), index, batch=batch, group=group)
    scales = x.inverse_scales
    if x.block == PER_ROW:
        scales = _tokens_of_rank(scales, index, batch=batch, group=group)
    part = Quantized(values.view(x.values.dtype), scales, x.block)
    product = scaled_mm(part, weight, dtype=dtype, is_fast=True)
    return product.view(batch, -1, product.shape[1])


def _tokens_of_rank(rows: Tensor, index: int, *, batch: int, group: Group) -> Tensor:
    """[B * S, K] -> [B * S/tp, K], of the tokens that a rank keeps."""
    parts = rows.view(batch, group.size, -1, rows.shape[1])
    return parts[:, index].flatten(0, 1)


def _is_aligned(weight: Quantized) -> bool:
    """Whether torch's operators, which do not pad, take a weight."""
    return all(size % ALIGNMENT == 0 for size in weight.values.shape)


def _gather_symmetric(
    x: Quantized,
    *,
    batch: int,
    weights: Sequence[Quantized],
    group: Group,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """torch's operator of gather and products, which reads symmetric memory of other ranks."""
    others = group.size - 1
    group.record("all_gather", num_bytes=others * x.values.nbytes)
    if x.block == PER_ROW:
        group.record("all_gather", num_bytes=others * x.inverse_scales.nbytes)
    _, outputs = torch.ops.symm_mem.fused_all_gather_scaled_matmul(
        x.values.view(batch, -1, x.values.shape[1]),
        [weight.values.t() for weight in weights],
        _input_scales(x, batch=batch),
        [_weight_scales(weight) for weight in weights],
        SEQUENCE,
        group_name(group),
        [None] * len(weights),  # no bias
        [None] * len(weights),  # no scale of the result
        [torch.bfloat16] * len(weights),
        [True] * len(weights),  # as products of the forward
    )
    return tuple(output.contiguous().to(dtype) for output in outputs)


def _scatter_symmetric(
    x: Quantized, *, batch: int, weight: Quantized, group: Group, dtype: torch.dtype
) -> Tensor:
    """torch's product over symmetric memory; it adds partial sums in fp32."""
    rows = x.values.view(batch, -1, x.values.shape[1])
    shape = [batch, rows.shape[1], len(weight.values)]
    num_bytes = rows.shape[0] * rows.shape[1] * shape[2] * torch.bfloat16.itemsize
    group.record("reduce_scatter", num_bytes=num_bytes * (group.size - 1) // group.size)
    out: Tensor = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
        rows,
        weight.values.t(),
        _input_scales(x, batch=batch),
        _weight_scales(weight),
        "sum",
        SEQUENCE,
        SEQUENCE,
        group_name(group),
        shape,
        None,  # no bias
        None,  # no scale of the result
        torch.bfloat16,
        True,  # as products of the forward
    )
    return out.to(dtype)


def _input_scales(x: Quantized, *, batch: int) -> Tensor:
    """[1] or [B, S, 1]."""
    if x.block == PER_ROW:
        return x.inverse_scales.view(batch, -1, 1)
    return x.inverse_scales.view(1)


def _weight_scales(weight: Quantized) -> Tensor:
    """[1] or [1, O]."""
    if weight.block == PER_ROW:
        return weight.inverse_scales.view(1, -1)
    return weight.inverse_scales.view(1)
