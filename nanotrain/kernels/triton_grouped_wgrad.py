"""A Triton kernel for the weight gradients of all experts, written or added in fp32.

    grad [T, O], x [T, I], sorted by expert   ->   out [E, O, I]
    expert e: grad[start:end]^T x[start:end], start and end from `offs`, which stays on the device

torch's grouped product returns 16 bits, which a hook adds to the fp32 buffer. Bytes per weight and
microbatch (2 written by the product, 2 read by the hook, and the buffer):

                          product and hook   this kernel
    first microbatch      2 + 2 + 4 = 8      4
    every other           2 + 2 + 8 = 12     8

A program computes one tile of one expert, in fp32. It adds to the buffer half a tile at a time, for
which registers suffice (tests/kernels/test_triton_compile.py). As in triton_softmax.py,
parameters are annotated for Triton's compiler, and with TRITON_INTERPRET=1 the kernel runs on CPU
tensors.

    T tokens   E local experts   O outputs   I inputs
"""

from collections.abc import Sequence

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

TILE_ROWS = 128
TILE_COLUMNS = 256
TILE_TOKENS = 64
BAND = 8  # rows of tiles whose programs run together, so that their operands stay in the L2 cache
WARPS = 8
STAGES = 3


if triton is not None:

    @triton.jit
    def _expert_span(offs: tl.tensor, expert: tl.tensor) -> tl.tuple:
        """The first token of an expert, and the end of its tokens."""
        start = tl.load(offs + expert - 1, mask=expert > 0, other=0)
        end = tl.load(offs + expert)
        return start, end

    @triton.jit
    def _tile_in_bands(
        tile: tl.tensor, row_tiles: tl.tensor, column_tiles: tl.tensor, band: tl.constexpr
    ) -> tl.tuple:
        """The row and the column of a tile; tiles are counted column by column inside of bands."""
        first_row = tile // (band * column_tiles) * band
        num_rows = min(row_tiles - first_row, band)
        inner = tile % (band * column_tiles)
        return first_row + inner % num_rows, inner // num_rows

    @triton.jit
    def _store_sums(
        sums: tl.tensor, target: tl.tensor, mask: tl.tensor, adds: tl.constexpr
    ) -> None:
        """Write sums, or add them to the values there."""
        if adds:
            sums += tl.load(target, mask=mask, other=0.0).to(tl.float32)
        tl.store(target, sums.to(target.dtype.element_ty), mask=mask)

    @triton.jit
    def _grouped_wgrad(
        grad: tl.tensor,
        x: tl.tensor,
        offs: tl.tensor,
        out: tl.tensor,
        outputs: tl.tensor,
        inputs: tl.tensor,
        adds: tl.constexpr,
        tile_rows: tl.constexpr,
        tile_columns: tl.constexpr,
        tile_tokens: tl.constexpr,
        band: tl.constexpr,
    ) -> None:
        """One tile of out[expert] = grad^T x over the tokens of the expert, or out += it."""
        row_tiles = tl.cdiv(outputs, tile_rows)
        column_tiles = tl.cdiv(inputs, tile_columns)
        tiles = row_tiles * column_tiles
        expert = tl.program_id(0) // tiles
        row_tile, column_tile = _tile_in_bands(
            tl.program_id(0) % tiles, row_tiles, column_tiles, band
        )
        start, end = _expert_span(offs, expert)
        rows = row_tile * tile_rows + tl.arange(0, tile_rows)
        columns = column_tile * tile_columns + tl.arange(0, tile_columns)
        is_row = rows < outputs
        is_column = columns < inputs
        total = tl.zeros([tile_rows, tile_columns], tl.float32)
        for first in range(start, end, tile_tokens):
            tokens = first + tl.arange(0, tile_tokens)
            is_token = (tokens < end)[:, None]
            token_rows = tokens.to(tl.int64)[:, None]
            grad_offsets = token_rows * outputs + rows[None, :]
            grad_mask = is_token & is_row[None, :]
            grads = tl.load(grad + grad_offsets, mask=grad_mask, other=0.0)
            x_offsets = token_rows * inputs + columns[None, :]
            x_mask = is_token & is_column[None, :]
            values = tl.load(x + x_offsets, mask=x_mask, other=0.0)
            total = tl.dot(tl.trans(grads), values, acc=total)
        matrix_row = expert.to(tl.int64) * outputs
        row_offsets = (matrix_row + rows)[:, None] * inputs
        half: tl.constexpr = tile_columns // 2
        halves = tl.reshape(total, (tile_rows, 2, half))
        left, right = tl.split(tl.permute(halves, (0, 2, 1)))
        first_column = column_tile * tile_columns + tl.arange(0, half)
        for part in tl.static_range(2):
            half_columns = first_column + part * half
            target = out + row_offsets + half_columns[None, :]
            mask = is_row[:, None] & (half_columns < inputs)[None, :]
            _store_sums(left if part == 0 else right, target, mask, adds)


@torch.library.custom_op("nanotrain::write_grouped_wgrad", mutates_args=("out",))
def write_grouped_wgrad(operands: Sequence[Tensor], out: Tensor, *, adds: bool) -> None:
    """Write grad^T x of every expert to `out`, or add it; zeros or nothing without tokens.

    Args:
        operands: grad [T, O] and x [T, I], contiguous, in 16 bits, sorted by expert; offs [E]
            int32, the end of each expert's tokens. Later tokens belong to no expert.
        out: [E, O, I] contiguous, in fp32 or 16 bits.
        adds: whether to add to the values of `out`.
    """
    grad, x, offs = operands
    experts, outputs, inputs = out.shape
    row_tiles = triton.cdiv(outputs, TILE_ROWS)
    column_tiles = triton.cdiv(inputs, TILE_COLUMNS)
    _grouped_wgrad[(experts * row_tiles * column_tiles,)](
        grad,
        x,
        offs,
        out,
        outputs,
        inputs,
        adds=adds,
        tile_rows=TILE_ROWS,
        tile_columns=TILE_COLUMNS,
        tile_tokens=TILE_TOKENS,
        band=BAND,
        num_warps=WARPS,
        num_stages=STAGES,
    )


@write_grouped_wgrad.register_fake
def _(operands: Sequence[Tensor], out: Tensor, *, adds: bool) -> None:
    """Write nothing."""
