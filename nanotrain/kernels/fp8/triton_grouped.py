"""A Triton kernel for the fp8 products of all experts, with blocks and formats that torch's grouped
product lacks.

    tokens     a [T, K], b [E * N, K]   -> [T, N], of each token with the matrix of its expert
    gradients  a [M, T], b [N, T]       -> [E, M, N], over the tokens of each expert, written or added to what is there

The tokens of expert e end at `offs[e]`, which stays on the device; gradients sum over tokens as
`triton_cast` places them. Sums are fp32: over a block of 128 values before its scales are applied,
of 32 by the tensor cores (`dot_scaled`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanotrain.kernels.fp8.scaled_mm import unpacked
from nanotrain.kernels.fp8.triton_cast import TILE, WARPS, How, Source, num_lanes

try:
    import triton
    import triton.language as tl

    from nanotrain.kernels.fp8.triton_cast import locate, span
except ImportError:
    triton = None


class Factor(NamedTuple):
    """One of two matrices; each stride is of an expert, a row, and for scales a block."""

    data: Tensor
    strides: tuple[int, int]
    scales: Tensor
    scale_strides: tuple[int, int, int]
    block_rows: int  # rows that share a scale


class Out(NamedTuple):
    """The product, and the sizes of all three."""

    data: Tensor
    strides: tuple[int, int]
    num_rows: int
    num_columns: int
    length: int  # of rows of both factors


if triton is not None:

    @triton.jit
    def _scales(
        factor: tl.tuple, expert: tl.tensor, rows: tl.tensor, block: tl.tensor, mask: tl.tensor
    ) -> tl.tensor:
        place = (
            expert * factor.scale_strides[0] + rows // factor.block_rows * factor.scale_strides[1]
        )
        return tl.load(factor.scales + place + block * factor.scale_strides[2], mask=mask, other=0)

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
        size: tl.constexpr = how.tile
        inner = tl.arange(0, size)
        columns = tl.program_id(1) * size + inner
        if sums:
            expert = tl.program_id(0) // tl.cdiv(out.num_rows, size)
            rows, end = tl.program_id(0) % tl.cdiv(out.num_rows, size) * size + inner, out.num_rows
            start, stop, first = span(source, expert, how)
            length = (stop - start + how.unit - 1) // how.unit * how.unit
        else:
            expert, start, end, _ = locate(source, how)
            rows, first, length = (
                start + inner,
                0,
                tl.where(expert < source.num_experts, out.length, 0),
            )
        is_row, is_column, expert = rows < end, columns < out.num_columns, expert.to(tl.int64)
        place_a = (
            expert * a.strides[0]
            + rows[:, None].to(tl.int64) * a.strides[1]
            + first
            + inner[None, :]
        )
        place_b = (
            expert * b.strides[0]
            + columns[None, :].to(tl.int64) * b.strides[1]
            + first
            + inner[:, None]
        )
        total = tl.zeros([size, size], tl.float32)
        for k in range(0, length, size):
            is_inner = inner < length - k
            x = tl.load(a.data + place_a + k, mask=is_row[:, None] & is_inner[None, :], other=0.0)
            y = tl.load(
                b.data + place_b + k, mask=is_column[None, :] & is_inner[:, None], other=0.0
            )
            if how.block == 0:
                total += tl.dot(x, y)
            elif how.block == size:
                block = (first + k) // size
                of_rows = _scales(a, expert, rows, block, is_row)[:, None]
                total += (
                    tl.dot(x, y) * of_rows * _scales(b, expert, columns, block, is_column)[None, :]
                )
            else:
                inner_blocks = tl.arange(0, size // how.block)
                block = (inner_blocks + (first + k) // how.block)[None, :]
                is_block = (inner_blocks * how.block < length - k)[None, :]
                of_rows = _scales(a, expert, rows[:, None], block, is_row[:, None] & is_block)
                of_columns = _scales(
                    b, expert, columns[:, None], block, is_column[:, None] & is_block
                )
                total = tl.dot_scaled(x, of_rows, "e4m3", y, of_columns, "e4m3", acc=total)
        if how.block == 0:
            total *= (
                _scales(a, expert, rows, 0, is_row)[:, None]
                * _scales(b, expert, columns, 0, is_column)[None, :]
            )
        place = (
            expert * out.strides[0] + rows[:, None].to(tl.int64) * out.strides[1] + columns[None, :]
        )
        mask = is_row[:, None] & is_column[None, :]
        if adds:
            total += tl.load(out.data + place, mask=mask, other=0).to(tl.float32)
        tl.store(out.data + place, total.to(out.data.dtype.element_ty), mask=mask)


@torch.library.custom_op("nanotrain::fp8_grouped_mm", mutates_args=())
def fp8_grouped_mm(
    operands: Sequence[Tensor], *, blocks: Sequence[int], sums: bool, dtype: torch.dtype
) -> Tensor:
    """[T, N] for tokens, or [E, M, N] for gradients; operands are those of `packed`, and `offs`."""
    out = _empty(operands, blocks=blocks, sums=sums, dtype=dtype)
    write_grouped_mm(operands, blocks, out=out, adds=False)
    return out


@fp8_grouped_mm.register_fake
def _empty(
    operands: Sequence[Tensor], *, blocks: Sequence[int], sums: bool, dtype: torch.dtype
) -> Tensor:
    rows, columns, experts = len(operands[0]), len(operands[2]), len(operands[4])
    return operands[0].new_empty(
        (experts, rows, columns) if sums else (rows, columns // experts), dtype=dtype
    )


def write_grouped_mm(
    operands: Sequence[Tensor], blocks: Sequence[int], *, out: Tensor, adds: bool
) -> None:
    """The product in `out`, or added to it: [T, N] for tokens, [E, M, N] for gradients."""
    (a, b), offs, sums = unpacked(operands[:4], blocks), operands[4], out.dim() == 3
    experts, (rows, columns) = len(offs), out.shape[-2:]
    block = a.block[1] or 0
    source = Source(a.values, rows, 0, (0, 0), offs, experts)
    how = How(num_lanes(experts), TILE, max(16, block), block=block).constants()
    target = Out(
        out,
        (out.stride(0) * sums, out.stride(-2)),
        rows,
        columns,
        min(a.values.shape[1], b.values.shape[1]),
    )
    num_tiles = experts * triton.cdiv(rows, TILE) if sums else triton.cdiv(rows, TILE) + experts
    factors = (
        Factor(
            each.values,
            (each.values.stride(0) * columns * is_stack, each.values.stride(0)),
            each.inverse_scales,
            _scale_strides(
                each.inverse_scales,
                experts=experts,
                block=each.block,
                is_stack=is_stack or (sums and not block),
            ),
            each.block[0] or 1,
        )
        for each, is_stack in ((a, False), (b, not sums))
    )
    grid = (num_tiles, triton.cdiv(columns, TILE))
    _multiply[grid](
        *factors, target, source, how, sums=sums, adds=adds, num_warps=WARPS, num_stages=3
    )


def _scale_strides(
    scales: Tensor, *, experts: int, block: tuple[int | None, int | None], is_stack: bool
) -> tuple[int, int, int]:
    if block == (None, None):
        return 1, 0, 0
    return len(scales) // experts * scales.stride(0) * is_stack, scales.stride(0), scales.stride(1)
