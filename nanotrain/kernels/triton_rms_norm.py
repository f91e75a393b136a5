"""Triton kernels of RMSNorm: `forward`, with or without a residual sum, and `backward` with the weight's gradient.

A program holds a tile of full rows in registers. The backward runs at most PROGRAMS programs; each sums the weight's
gradient over its rows in fp32, and torch sums the parts, so that no atomic addition makes the result vary.

With r = 1 / sqrt(mean(x^2) + eps) and n = x * r, for the gradient g of the output and w the weight, or 1 + weight

    grad_x = r * (g * w - n * mean(g * w * n)) + gradient of the sum        grad_weight = sum over rows of g * n
"""

from dataclasses import dataclass

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

TILE = 4096  # elements that a program handles at once, where rows are shorter
MAX_SIZE = 16384  # of a row: longer ones do not fit in registers
PROGRAMS = 512  # of the backward: about four per multiprocessor of an H100


if triton is not None:

    @triton.jit
    def _forward(
        x: tl.tensor,
        residual: tl.tensor,
        weight: tl.tensor,
        out: tl.tensor,
        total: tl.tensor,
        scale: tl.tensor,
        num_rows: tl.tensor,
        size: tl.tensor,
        eps: tl.tensor,
        offset: tl.tensor,
        has_residual: tl.constexpr,
        tile: tl.constexpr,
        block: tl.constexpr,
    ) -> None:
        row, column = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile), tl.arange(0, block)
        place = row[:, None] * size + column[None, :]
        inside = (row < num_rows)[:, None] & (column < size)[None, :]
        values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        if has_residual:
            values += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
            rounded = values.to(total.dtype.element_ty)
            tl.store(total + place, rounded, mask=inside)
            values = rounded.to(tl.float32)  # the norm is of what the backward reads again
        inverse = 1.0 / tl.sqrt(tl.sum(values * values, 1) / size + eps)
        tl.store(scale + row, inverse, mask=row < num_rows)
        w = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32) + offset
        normalized = values * inverse[:, None] * w[None, :]
        tl.store(out + place, normalized.to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _backward(
        grad: tl.tensor,
        grad_total: tl.tensor,
        x: tl.tensor,
        weight: tl.tensor,
        scale: tl.tensor,
        out: tl.tensor,
        parts: tl.tensor,
        num_rows: tl.tensor,
        size: tl.tensor,
        offset: tl.tensor,
        num_tiles: tl.tensor,
        has_residual: tl.constexpr,
        tile: tl.constexpr,
        block: tl.constexpr,
    ) -> None:
        program, column = tl.program_id(0).to(tl.int64), tl.arange(0, block)
        w = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32) + offset
        grad_weight = tl.zeros((block,), tl.float32)
        for index in range(num_tiles):
            row = (program * num_tiles + index) * tile + tl.arange(0, tile)
            place = row[:, None] * size + column[None, :]
            inside = (row < num_rows)[:, None] & (column < size)[None, :]
            g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
            inverse = tl.load(scale + row, mask=row < num_rows, other=0.0)[:, None]
            n = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * inverse
            grad_weight += tl.sum(g * n, 0)
            weighted = g * w[None, :]
            dx = inverse * (weighted - n * (tl.sum(weighted * n, 1) / size)[:, None])
            if has_residual:
                dx += tl.load(grad_total + place, mask=inside, other=0.0).to(tl.float32)
            tl.store(out + place, dx.to(out.dtype.element_ty), mask=inside)
        tl.store(parts + program * size + column, grad_weight, mask=column < size)


@dataclass(frozen=True)
class Rows:
    """What the forward keeps for the backward."""

    x: Tensor  # [..., size], contiguous; the sum, where there is one
    weight: Tensor  # [size]
    scale: Tensor  # [...] fp32
    is_offset: bool


def forward(
    x: Tensor, residual: Tensor | None, *, weight: Tensor, eps: float, is_offset: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of x, or of x + residual; the sum; and the factor of each row.

    Args:
        x: [..., size], contiguous; residual alike.
        residual: None for none; then the sum is x.
        weight: [size], contiguous.
        eps: added to the mean square.
        is_offset: the weight is the difference from 1.
    """
    out, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
    scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    size, num_rows = x.shape[-1], scale.numel()
    if num_rows:
        tile, options = _tiling(size)
        tensors = (x, x if residual is None else residual, weight, out, total, scale)
        numbers = (num_rows, size, eps, float(is_offset))
        _forward[(triton.cdiv(num_rows, tile),)](*tensors, *numbers, has_residual=residual is not None, **options)
    return out, total, scale


def backward(rows: Rows, grad: Tensor, *, grad_total: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients of x (and of the residual, which is the same) and of the weight.

    Args:
        rows: of the forward.
        grad: [..., size] of the norm, contiguous.
        grad_total: of the sum; None where there was none.
    """
    out, size, num_rows = torch.empty_like(rows.x), rows.x.shape[-1], rows.scale.numel()
    tile, options = _tiling(size)
    num_tiles = triton.cdiv(triton.cdiv(num_rows, tile), PROGRAMS)  # per program
    parts = torch.empty(
        (triton.cdiv(num_rows, tile * max(num_tiles, 1)), size), dtype=torch.float32, device=grad.device
    )
    if num_rows:
        tensors = (grad, grad if grad_total is None else grad_total, rows.x, rows.weight, rows.scale, out, parts)
        numbers = (num_rows, size, float(rows.is_offset), num_tiles)
        _backward[(len(parts),)](*tensors, *numbers, has_residual=grad_total is not None, **options)
    return out, parts.sum(0).to(rows.weight.dtype)


def _tiling(size: int) -> tuple[int, dict[str, int]]:
    """Rows per program, and the options of a launch."""
    block = triton.next_power_of_2(size)
    tile = max(1, TILE // block)
    return tile, {"tile": tile, "block": block, "num_warps": min(16, max(4, tile * block // 512))}
