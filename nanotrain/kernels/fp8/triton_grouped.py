"""A Triton kernel for the fp8 products of all experts, with blocks that torch lacks.

    tokens     a [T, K], b [E * N, K]   -> [T, N], each token times the matrix of its expert
    gradients  a [M, T], b [N, T]       -> [E, M, N], sums over the tokens of each expert, written
                                           or added

The tokens of expert e end at `offs[e]`, which stays on the device; for gradients tokens are padded
as in `triton_cast`. Sums are fp32: over a block of 128 values before its scales are applied, over
blocks of 32 by the tensor cores (`dot_scaled`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanotrain.kernels.fp8.quantize import Quantized
from nanotrain.kernels.fp8.scaled_mm import unpack_operands
from nanotrain.kernels.fp8.triton_tiles import TILE, WARPS, How, Source, num_lanes
from nanotrain.precision.fp8 import PER_TENSOR

try:
    import triton
    import triton.language as tl

    from nanotrain.kernels.fp8.triton_tiles import locate, span
except ImportError:
    triton = None


class Factor(NamedTuple):
    """An operand of a matrix product."""

    data: Tensor
    strides: tuple[int, int]  # per expert and row
    scales: Tensor
    scale_strides: tuple[int, int, int]  # per expert, row and block
    block_rows: int  # rows that share a scale


class Out(NamedTuple):
    """The product, and the sizes of all three matrices."""

    data: Tensor
    strides: tuple[int, int]  # per expert and row
    num_rows: int
    num_columns: int
    length: int  # length of the rows of both factors


if triton is not None:

    @triton.jit
    def _load_scales(
        factor: tl.tuple, expert: tl.tensor, rows: tl.tensor, block: tl.tensor, mask: tl.tensor
    ) -> tl.tensor:
        """The inverse scales of blocks of rows of a factor; 0 outside the mask."""
        row_offsets = rows // factor.block_rows * factor.scale_strides[1]
        offsets = expert * factor.scale_strides[0] + row_offsets + block * factor.scale_strides[2]
        return tl.load(factor.scales + offsets, mask=mask, other=0)

    @triton.jit
    def _offsets(
        factor: tl.tuple, expert: tl.tensor, rows: tl.tensor, first: tl.tensor, inner: tl.tensor
    ) -> tl.tensor:
        """Offsets of elements `first + inner` of the rows of an expert's matrix."""
        row_offsets = expert * factor.strides[0] + rows.to(tl.int64) * factor.strides[1]
        return row_offsets + first + inner

    @triton.jit
    def _store_tile(
        total: tl.tensor, out: tl.tuple, offsets: tl.tensor, mask: tl.tensor, adds: tl.constexpr
    ) -> None:
        """Write the sums of a tile, or add them to the values there."""
        if adds:
            total += tl.load(out.data + offsets, mask=mask, other=0).to(tl.float32)
        tl.store(out.data + offsets, total.to(out.data.dtype.element_ty), mask=mask)

    @triton.jit
    def _multiply(
        a: tl.tuple,
        b: tl.tuple,
        out: tl.tuple,
        source: tl.tuple,
        how: tl.tuple,
        sums: tl.constexpr,
        adds: tl.constexpr,
    ) -> None:
        """One tile of the product of an expert, summed over blocks of the inner dimension.

        With `sums`, a and b are summed over the tokens of the expert (wgrad), else each token is
        multiplied by the matrix of its expert (forward and dgrad).
        """
        size: tl.constexpr = how.tile
        inner = tl.arange(0, size)
        columns = tl.program_id(1) * size + inner
        if sums:
            num_tiles = tl.cdiv(out.num_rows, size)
            expert = tl.program_id(0) // num_tiles
            rows = tl.program_id(0) % num_tiles * size + inner
            end = out.num_rows
            start, stop, first = span(source, expert, how)
            length = (stop - start + how.unit - 1) // how.unit * how.unit
        else:
            expert, start, end, _ = locate(source, how)
            rows = start + inner
            first = 0
            length = tl.where(expert < source.num_experts, out.length, 0)
        is_row = rows < end
        is_column = columns < out.num_columns
        expert = expert.to(tl.int64)
        offsets_a = _offsets(a, expert, rows[:, None], first, inner[None, :])
        offsets_b = _offsets(b, expert, columns[None, :], first, inner[:, None])
        total = tl.zeros([size, size], tl.float32)
        for k in range(0, length, size):
            is_inner = inner < length - k
            mask_a = is_row[:, None] & is_inner[None, :]
            mask_b = is_column[None, :] & is_inner[:, None]
            x = tl.load(a.data + offsets_a + k, mask=mask_a, other=0.0)
            y = tl.load(b.data + offsets_b + k, mask=mask_b, other=0.0)
            if how.block == 0:
                total += tl.dot(x, y)
            elif how.block == size:
                block = (first + k) // size
                scales_a = _load_scales(a, expert, rows, block, is_row)[:, None]
                scales_b = _load_scales(b, expert, columns, block, is_column)[None, :]
                total += tl.dot(x, y) * scales_a * scales_b
            else:
                inner_blocks = tl.arange(0, size // how.block)
                block = (inner_blocks + (first + k) // how.block)[None, :]
                is_block = (inner_blocks * how.block < length - k)[None, :]
                has_scale_a = is_row[:, None] & is_block
                has_scale_b = is_column[:, None] & is_block
                scales_a = _load_scales(a, expert, rows[:, None], block, has_scale_a)
                scales_b = _load_scales(b, expert, columns[:, None], block, has_scale_b)
                total = tl.dot_scaled(x, scales_a, "e4m3", y, scales_b, "e4m3", acc=total)
        if how.block == 0:
            scales_a = _load_scales(a, expert, rows, 0, is_row)[:, None]
            scales_b = _load_scales(b, expert, columns, 0, is_column)[None, :]
            total *= scales_a * scales_b
        offsets = _offsets(out, expert, rows[:, None], 0, columns[None, :])
        _store_tile(total, out, offsets, is_row[:, None] & is_column[None, :], adds)


@torch.library.custom_op("nanotrain::fp8_grouped_mm", mutates_args=())
def fp8_grouped_mm(
    operands: Sequence[Tensor], *, blocks: Sequence[int], sums: bool, dtype: torch.dtype
) -> Tensor:
    """[T, N] for tokens, or [E, M, N] for gradients; see `write_grouped_mm`."""
    out = _empty_product(operands, blocks=blocks, sums=sums, dtype=dtype)
    write_grouped_mm(operands, blocks, out=out, adds=False)
    return out


@fp8_grouped_mm.register_fake
def _empty_product(
    operands: Sequence[Tensor], *, blocks: Sequence[int], sums: bool, dtype: torch.dtype
) -> Tensor:
    a, _, b, _, offs = operands
    experts = len(offs)
    shape = (experts, len(a), len(b)) if sums else (len(a), len(b) // experts)
    return a.new_empty(shape, dtype=dtype)


def write_grouped_mm(
    operands: Sequence[Tensor], blocks: Sequence[int], *, out: Tensor, adds: bool
) -> None:
    """Write a product to `out`, or add it: [T, N] for tokens, [E, M, N] for gradients.

    Args:
        operands: the tensors of `pack_operands`, and `offs`.
        blocks: the block sizes of `pack_operands`.
        out: the result; its number of dims selects the product.
        adds: whether to add to the values of `out`.
    """
    a, b = unpack_operands(operands[:4], blocks)
    offs = operands[4]
    experts = len(offs)
    sums = out.dim() == 3
    rows, columns = out.shape[-2:]
    block = a.block[1] or 0
    has_expert_scales = sums and not block  # scales of gradients are per expert
    target = Out(
        data=out,
        strides=(out.stride(0) if sums else 0, out.stride(-2)),
        num_rows=rows,
        num_columns=columns,
        length=min(a.values.shape[1], b.values.shape[1]),
    )
    row_tiles = triton.cdiv(rows, TILE)
    num_tiles = experts * row_tiles if sums else row_tiles + experts
    grid = (num_tiles, triton.cdiv(columns, TILE))
    factor_a = _factor(a, experts=experts, rows_per_expert=0, has_expert_scales=has_expert_scales)
    factor_b = _factor(
        b,
        experts=experts,
        rows_per_expert=0 if sums else columns,
        has_expert_scales=has_expert_scales or not sums,
    )
    source = Source(a.values, rows, 0, (0, 0), offs, experts)
    how = How(num_lanes(experts), unit=max(16, block), block=block)
    _multiply[grid](
        factor_a,
        factor_b,
        target,
        source,
        how.constants(),
        sums=sums,
        adds=adds,
        num_warps=WARPS,
        num_stages=3,
    )


def _factor(
    matrix: Quantized, *, experts: int, rows_per_expert: int, has_expert_scales: bool
) -> Factor:
    """A matrix with its strides; `rows_per_expert` is 0 where experts share its rows."""
    row_stride = matrix.values.stride(0)
    return Factor(
        data=matrix.values,
        strides=(row_stride * rows_per_expert, row_stride),
        scales=matrix.inverse_scales,
        scale_strides=_scale_strides(matrix, experts=experts, is_stack=has_expert_scales),
        block_rows=matrix.block[0] or 1,
    )


def _scale_strides(matrix: Quantized, *, experts: int, is_stack: bool) -> tuple[int, int, int]:
    """Strides of an expert, a row and a block."""
    if matrix.block == PER_TENSOR:
        return 1, 0, 0
    scales = matrix.inverse_scales
    row_stride = scales.stride(0)
    expert_stride = len(scales) // experts * row_stride if is_stack else 0
    return expert_stride, row_stride, scales.stride(1)
