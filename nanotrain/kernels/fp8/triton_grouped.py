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
from nanotrain.kernels.fp8.triton_tiles import (
    TILE,
    WARPS,
    How,
    Source,
    line_unit,
    num_lanes,
)
from nanotrain.precision.fp8 import PER_TENSOR

try:
    import triton
    import triton.language as tl

    from nanotrain.kernels.fp8.triton_tiles import locate, span
except ImportError:
    triton = None


class Factor(NamedTuple):
    """An operand of a matrix product.

    Strides are fields, not tuples: in a loop Triton 3.6 cannot read a stride of 1 from a tuple in
    a tuple.
    """

    data: Tensor
    expert_stride: int
    row_stride: int
    scales: Tensor
    scale_expert_stride: int
    scale_row_stride: int
    scale_block_stride: int
    tensor_scales: Tensor | None = None  # of experts, in NVFP4


class Out(NamedTuple):
    """The product, and the sizes of all three matrices."""

    data: Tensor
    expert_stride: int
    row_stride: int
    num_rows: int
    num_columns: int
    length: int  # length of the rows of both factors


if triton is not None:

    @triton.jit
    def _load_scales(
        factor: tl.tuple, expert: tl.tensor, rows: tl.tensor, block: tl.tensor, mask: tl.tensor
    ) -> tl.tensor:
        """The inverse scales of a block of each row of a factor; 0 outside the mask."""
        row_offsets = rows * factor.scale_row_stride + block * factor.scale_block_stride
        offsets = expert * factor.scale_expert_stride + row_offsets
        return tl.load(factor.scales + offsets, mask=mask, other=0)

    @triton.jit
    def _load_short_blocks(
        factor: tl.tuple, place: tl.tuple, rows: tl.tensor, mask: tl.tensor, how: tl.tuple
    ) -> tl.tensor:
        """The scales of the blocks of a tile in each row, [rows, blocks] bytes read as words.

        `place` has the expert, and where the tile begins in a row.
        """
        expert, first = place
        blocks = tl.arange(0, how.tile // how.block)
        expert_offset = expert * factor.scale_expert_stride
        row_offsets = expert_offset + rows * factor.scale_row_stride
        # a row has whole tiles: `line_unit`
        words = tl.multiple_of(row_offsets + first // how.block, 8 if how.packs else 4)
        offsets = words[:, None] + blocks[None, :]
        return tl.load(factor.scales + offsets, mask=mask[:, None], other=0.0)

    @triton.jit
    def _block_scales(
        factors: tl.tuple, tile: tl.tuple, block: tl.tensor, how: tl.tuple
    ) -> tl.tensor:
        """The products of scales of a block of 128 values: [rows, 1] or [rows, columns]."""
        a, b = factors
        expert, rows, columns, is_row, is_column = tile
        scales = _load_scales(a, expert, rows, block, is_row)[:, None]
        if how.block_rows == how.tile:  # the columns of a program have one scale
            column_tile = tl.program_id(1).to(tl.int64)
            scales *= _load_scales(b, expert, column_tile, block, True)
        else:
            scales *= _load_scales(b, expert, columns, block, is_column)[None, :]
        return scales

    @triton.jit
    def _add_block_products(
        x: tl.tensor,
        y: tl.tensor,
        total: tl.tensor,
        factors: tl.tuple,
        tile: tl.tuple,
        first: tl.tensor,
        how: tl.tuple,
    ) -> tl.tensor:
        """Add the products of values from `first` on in their rows, which have scales per block."""
        a, b = factors
        expert, rows, columns, is_row, is_column = tile
        if how.block == how.tile:
            total += tl.dot(x, y) * _block_scales(factors, tile, first // how.tile, how)
        else:
            place = (expert, first)
            scales_a = _load_short_blocks(a, place, rows, is_row, how)
            scales_b = _load_short_blocks(b, place, columns, is_column, how)
            if how.packs:
                total = tl.dot_scaled(x, scales_a, "e2m1", y, scales_b, "e2m1", acc=total)
            else:
                total = tl.dot_scaled(x, scales_a, "e4m3", y, scales_b, "e4m3", acc=total)
        return total

    @triton.jit
    def _scale_sums(
        total: tl.tensor, factors: tl.tuple, tile: tl.tuple, source: tl.tuple, how: tl.tuple
    ) -> tl.tensor:
        """The sums times the scales of rows or tensors, which have not been applied."""
        a, b = factors
        expert, rows, columns, is_row, is_column = tile
        has_scale = expert < source.num_experts
        if how.block == 0 and how.block_rows == 0:
            scale_a = _load_scales(a, expert, 0, 0, has_scale)
            total *= scale_a * _load_scales(b, expert, 0, 0, has_scale)
        elif how.block == 0:
            scales_a = _load_scales(a, expert, rows, 0, is_row)[:, None]
            total *= scales_a * _load_scales(b, expert, columns, 0, is_column)[None, :]
        elif how.packs:
            scale_a = tl.load(a.tensor_scales + expert, mask=has_scale, other=0)
            total *= scale_a * tl.load(b.tensor_scales + expert, mask=has_scale, other=0)
        return total

    @triton.jit
    def _offsets(
        factor: tl.tuple, expert: tl.tensor, rows: tl.tensor, first: tl.tensor, inner: tl.tensor
    ) -> tl.tensor:
        """Offsets of elements `first + inner` of the rows of an expert's matrix."""
        row_offsets = expert * factor.expert_stride + rows * factor.row_stride
        return row_offsets + first + inner

    @triton.jit
    def _add_halves(
        total: tl.tensor, out: tl.tuple, expert: tl.tensor, rows: tl.tensor, is_row: tl.tensor
    ) -> None:
        """Add the sums of a tile to the values of `out`, half of the columns at a time.

        Registers suffice for one half of the values besides the sums.
        """
        size: tl.constexpr = total.shape[0]
        half: tl.constexpr = size // 2
        halves = tl.reshape(total, (size, 2, half))
        left, right = tl.split(tl.permute(halves, (0, 2, 1)))
        first_column = tl.program_id(1).to(tl.int64) * size + tl.arange(0, half)
        row_places = rows[:, None]
        has_row = is_row[:, None]
        for part in tl.static_range(2):
            columns = first_column + part * half
            offsets = _offsets(out, expert, row_places, 0, columns[None, :])
            is_column = columns < out.num_columns
            mask = has_row & is_column[None, :]
            target = out.data + offsets
            earlier = tl.load(target, mask=mask, other=0)
            sums = left if part == 0 else right
            sums += earlier.to(tl.float32)
            values = sums.to(out.data.dtype.element_ty)
            tl.store(target, values, mask=mask)

    @triton.jit
    def _store_sums(total: tl.tensor, out: tl.tuple, tile: tl.tuple, adds: tl.constexpr) -> None:
        """Write the sums of a tile, or add them to the values there."""
        expert, rows, columns, is_row, is_column = tile
        if adds:
            _add_halves(total, out, expert, rows, is_row)
        else:
            row_places = rows[:, None]
            offsets = _offsets(out, expert, row_places, 0, columns[None, :])
            values = total.to(out.data.dtype.element_ty)
            has_row = is_row[:, None]
            mask = has_row & is_column[None, :]
            tl.store(out.data + offsets, values, mask=mask)

    @triton.jit
    def _multiply(
        a: tl.tuple,
        b: tl.tuple,
        out: tl.tuple,
        source: tl.tuple,
        how: tl.tuple,
        sums: tl.constexpr,
        adds: tl.constexpr,
        is_fast: tl.constexpr,
    ) -> None:
        """One tile of the product of an expert, summed over blocks of the inner dimension.

        With `sums`, a and b are summed over the tokens of the expert (wgrad), else each token is
        multiplied by the matrix of its expert (forward and dgrad).

        Tensor cores before Blackwell add fp8 products in 14 bits. Unless `is_fast`, a tile of 128
        is a sum of its own there, added in fp32. The option `max_num_imprecise_acc` of `tl.dot`
        would do so before the tensor cores have finished, as Triton 3.6 and 3.7 compile it.
        """
        program = tl.program_id(0)
        size: tl.constexpr = how.tile
        inner = tl.arange(0, size)
        columns = tl.program_id(1).to(tl.int64) * size + inner
        if sums:
            num_tiles = tl.cdiv(out.num_rows, size)
            expert = program // num_tiles
            row_tile = program % num_tiles
            rows = row_tile.to(tl.int64) * size + inner
            end = out.num_rows
            start, stop, first = span(source, expert, how)
            length = tl.cdiv(stop - start, how.unit) * how.unit
        else:
            expert, start, end, _ = locate(source, program, how)
            rows = start + inner
            first = tl.full([], 0, tl.int64)
            length = tl.where(expert < source.num_experts, out.length, 0)
        if how.packs and sums:  # from values to bytes, of a row
            first = (first // 2).to(tl.int32)
            length = (length // 2).to(tl.int32)
        is_row = rows < end
        is_column = columns < out.num_columns
        expert = expert.to(tl.int64)
        row_places = rows[:, None]
        column_places = columns[None, :]
        inner_columns = inner[None, :]
        inner_rows = inner[:, None]
        has_row = is_row[:, None]
        has_column = is_column[None, :]
        offsets_a = _offsets(a, expert, row_places, first, inner_columns)
        offsets_b = _offsets(b, expert, column_places, first, inner_rows)
        data_a = a.data + offsets_a
        data_b = b.data + offsets_b
        factors = (a, b)
        tile = (expert, rows, columns, is_row, is_column)
        total = tl.zeros([size, size], tl.float32)
        for k in range(0, length, size):
            is_inner = inner < length - k
            mask_a = has_row & is_inner[None, :]
            mask_b = has_column & is_inner[:, None]
            x = tl.load(data_a + k, mask=mask_a, other=0.0)
            y = tl.load(data_b + k, mask=mask_b, other=0.0)
            if how.block == 0 and is_fast:
                total = tl.dot(x, y, acc=total)
            elif how.block == 0:
                total += tl.dot(x, y)
            else:
                total = _add_block_products(x, y, total, factors, tile, first + k, how)
        total = _scale_sums(total, factors, tile, source, how)
        _store_sums(total, out, tile, adds)


@torch.library.custom_op("nanotrain::fp8_grouped_mm", mutates_args=())
def fp8_grouped_mm(
    operands: Sequence[Tensor],
    *,
    blocks: Sequence[int],
    sums: bool,
    dtype: torch.dtype,
    is_fast: bool = False,
) -> Tensor:
    """[T, N] for tokens, or [E, M, N] for gradients; see `write_grouped_mm`."""
    out = _empty_product(operands, blocks=blocks, sums=sums, dtype=dtype)
    write_grouped_mm(operands, blocks, out=out, adds=False, is_fast=is_fast)
    return out


@fp8_grouped_mm.register_fake
def _empty_product(
    operands: Sequence[Tensor],
    *,
    blocks: Sequence[int],
    sums: bool,
    dtype: torch.dtype,
    is_fast: bool = False,
) -> Tensor:
    """The uninitialized result of `fp8_grouped_mm`."""
    a, _, b, _, offs = operands
    experts = len(offs)
    shape = (experts, len(a), len(b)) if sums else (len(a), len(b) // experts)
    return a.new_empty(shape, dtype=dtype)


@torch.library.custom_op("nanotrain::fp8_write_grouped_mm", mutates_args=("out",))
def fp8_write_grouped_mm(
    operands: Sequence[Tensor], out: Tensor, *, blocks: Sequence[int], adds: bool
) -> None:
    """`write_grouped_mm` as an operator, which computes nothing on the meta device."""
    write_grouped_mm(operands, blocks, out=out, adds=adds)


@fp8_write_grouped_mm.register_fake
def _(operands: Sequence[Tensor], out: Tensor, *, blocks: Sequence[int], adds: bool) -> None:
    pass


def write_grouped_mm(
    operands: Sequence[Tensor],
    blocks: Sequence[int],
    *,
    out: Tensor,
    adds: bool,
    is_fast: bool = False,
) -> None:
    """Write a product to `out`, or add it: [T, N] for tokens, [E, M, N] for gradients.

    Args:
        operands: the tensors of `pack_operands`, and `offs`.
        blocks: the block sizes of `pack_operands`.
        out: the result; its number of dims selects the product.
        adds: whether to add to the values of `out`.
        is_fast: whether all of a sum may stay in the tensor cores, for products of the forward.
    """
    *matrices, offs = operands
    a, b = unpack_operands(matrices, blocks)
    experts = len(offs)
    sums = out.dim() == 3
    rows, columns = out.shape[-2:]
    block = a.block[1] or 0
    has_expert_scales = sums and not block  # scales of gradients are per expert
    target = Out(
        data=out,
        expert_stride=out.stride(0) if sums else 0,
        row_stride=out.stride(-2),
        num_rows=rows,
        num_columns=columns,
        length=min(a.values.shape[1], b.values.shape[1]),
    )
    factor_a = _factor(a, experts=experts, rows_per_expert=0, has_expert_scales=has_expert_scales)
    factor_b = _factor(
        b,
        experts=experts,
        rows_per_expert=0 if sums else columns,
        has_expert_scales=has_expert_scales or not sums,
    )
    source = Source(a.values, rows, 0, 0, 0, offs, experts)
    block_rows = b.block[0] or 0
    how = How(num_lanes(experts), unit=line_unit(block), block_rows=block_rows, block=block)
    factors = (factor_a, factor_b)
    launch_products(factors, target, source=source, how=how, adds=adds, is_fast=is_fast)


def launch_products(
    factors: tuple[Factor, Factor],
    out: Out,
    *,
    source: Source,
    how: How,
    adds: bool,
    is_fast: bool = False,
) -> None:
    """Run the programs of the products of all experts.

    Args:
        factors: both matrices.
        out: the result; its number of dims selects the product.
        source: the rows of the product, and the ends of the experts' tokens.
        how: constants of the kernel.
        adds: whether to add to the values of `out`.
        is_fast: whether all of a sum may stay in the tensor cores.
    """
    experts = source.num_experts
    sums = out.data.dim() == 3
    row_tiles = triton.cdiv(out.num_rows, TILE)
    num_tiles = experts * row_tiles if sums else row_tiles + experts
    grid = (num_tiles, triton.cdiv(out.num_columns, TILE))
    _multiply[grid](
        *factors,
        out,
        source,
        how.constants(),
        sums=sums,
        adds=adds,
        is_fast=is_fast,
        num_warps=WARPS,
        num_stages=3,
    )


def _factor(
    matrix: Quantized, *, experts: int, rows_per_expert: int, has_expert_scales: bool
) -> Factor:
    """A matrix with its strides; `rows_per_expert` is 0 where experts share its rows."""
    row_stride = matrix.values.stride(0)
    expert, row, block = _scale_strides(matrix, experts=experts, is_stack=has_expert_scales)
    return Factor(
        data=matrix.values,
        expert_stride=row_stride * rows_per_expert,
        row_stride=row_stride,
        scales=matrix.inverse_scales,
        scale_expert_stride=expert,
        scale_row_stride=row,
        scale_block_stride=block,
    )


def _scale_strides(matrix: Quantized, *, experts: int, is_stack: bool) -> tuple[int, int, int]:
    """Strides of an expert, a row and a block."""
    if matrix.block == PER_TENSOR:
        return 1, 0, 0
    scales = matrix.inverse_scales
    row_stride = scales.stride(0)
    expert_stride = len(scales) // experts * row_stride if is_stack else 0
    return expert_stride, row_stride, scales.stride(1)
