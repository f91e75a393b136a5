"""Triton kernels of permute and unpermute: one launch each, every row read and written once.

    spread             a token to the positions of its pairs          reads T rows, writes P
    combine            the rows of a token, weighted, summed in fp32  reads P rows, writes T
    combine_backward   gradients of the rows and of their weights     reads T + P rows, writes P

Positions from the number of rows on are those of dropped pairs. As in triton_softmax.py, parameters
are annotated for Triton's compiler, and with TRITON_INTERPRET=1 the kernels run on CPU tensors.

    T tokens   K experts per token   P permuted tokens   H hidden
"""

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

# elements of a row that a program handles at once: 16 bytes per thread of 128 in 16 bits
BLOCK = 1024


if triton is not None:

    @triton.jit
    def _spread(
        x: tl.tensor,
        positions: tl.tensor,
        out: tl.tensor,
        num_rows: tl.tensor,
        width: tl.tensor,
        topk: tl.constexpr,
        block: tl.constexpr,
    ) -> None:
        token = tl.program_id(0).to(tl.int64)
        columns = tl.program_id(1) * block + tl.arange(0, block)
        inside = columns < width
        values = tl.load(x + token * width + columns, mask=inside)
        for k in range(topk):
            row = tl.load(positions + token * topk + k)
            tl.store(out + row * width + columns, values, mask=inside & (row < num_rows))

    @triton.jit
    def _combine(
        rows: tl.tensor,
        positions: tl.tensor,
        weights: tl.tensor,
        out: tl.tensor,
        num_rows: tl.tensor,
        width: tl.tensor,
        topk: tl.constexpr,
        is_weighted: tl.constexpr,
        block: tl.constexpr,
    ) -> None:
        token = tl.program_id(0).to(tl.int64)
        columns = tl.program_id(1) * block + tl.arange(0, block)
        inside = columns < width
        total = tl.zeros([block], tl.float32)
        for k in range(topk):
            row = tl.load(positions + token * topk + k)
            values = tl.load(
                rows + row * width + columns, mask=inside & (row < num_rows), other=0.0
            ).to(tl.float32)
            if is_weighted:
                values *= tl.load(weights + token * topk + k)
            total += values
        tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _combine_backward(
        grad: tl.tensor,
        rows: tl.tensor,
        positions: tl.tensor,
        weights: tl.tensor,
        grad_rows: tl.tensor,
        grad_weights: tl.tensor,
        num_rows: tl.tensor,
        width: tl.tensor,
        topk: tl.constexpr,
        block: tl.constexpr,
    ) -> None:
        # those of a token run together and read its gradient from the cache
        pair = tl.program_id(0).to(tl.int64)
        row, weight = tl.load(positions + pair), tl.load(weights + pair)
        along = tl.zeros([block], tl.float32)
        for start in range(0, width, block):
            columns = start + tl.arange(0, block)
            inside = (columns < width) & (row < num_rows)
            of_token = tl.load(grad + pair // topk * width + columns, mask=inside, other=0.0).to(
                tl.float32
            )
            values = tl.load(rows + row * width + columns, mask=inside, other=0.0).to(tl.float32)
            along += values * of_token
            result = (of_token * weight).to(grad_rows.dtype.element_ty)
            tl.store(grad_rows + row * width + columns, result, mask=inside)
        tl.store(grad_weights + pair, tl.sum(along, 0))


def spread(x: Tensor, order: Tensor, *, inverse: Tensor) -> Tensor:
    """[T, H] -> [P, H], each token at the positions `inverse` [T, K] below P, the length of
    `order`.
    """
    out = x.new_empty(len(order), x.shape[1])
    if out.numel():
        _spread[_grid(inverse, x)](x.contiguous(), inverse.contiguous(), out, *_sizes(out, inverse))
    return out


def combine(permuted: Tensor, inverse: Tensor, *, weights: Tensor | None) -> Tensor:
    """[P, H] -> [T, H]: the sum of the rows at each token's positions, times weights [T, K] fp32
    where given.
    """
    out = permuted.new_empty(len(inverse), permuted.shape[1])
    if out.numel():
        permuted, inverse, is_weighted = (
            permuted.contiguous(),
            inverse.contiguous(),
            weights is not None,
        )
        factors = permuted if weights is None else weights.contiguous()
        sizes = _sizes(permuted, inverse)
        _combine[_grid(inverse, out)](
            permuted, inverse, factors, out, *sizes[:3], is_weighted, sizes[3]
        )
    return out


def combine_backward(
    grad: Tensor, permuted: Tensor, *, order: Tensor, inverse: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of `combine`: [P, H] of the rows and [T, K] fp32 of the weights."""
    permuted, weights = permuted.contiguous(), weights.contiguous()
    grad_rows, grad_weights = torch.empty_like(permuted), torch.empty_like(weights)
    if inverse.numel():
        inputs = (grad.contiguous(), permuted, inverse.contiguous(), weights)
        _combine_backward[(inverse.numel(),)](
            *inputs, grad_rows, grad_weights, *_sizes(permuted, inverse)
        )
    return grad_rows, grad_weights


def _grid(inverse: Tensor, tokens: Tensor) -> tuple[int, int]:
    return len(inverse), triton.cdiv(tokens.shape[1], BLOCK)


def _sizes(rows: Tensor, inverse: Tensor) -> tuple[Any, ...]:
    """Rows, their width, rows of a token, and elements of a program."""
    return len(rows), rows.shape[1], inverse.shape[1], BLOCK
