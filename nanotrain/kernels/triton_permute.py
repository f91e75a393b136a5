"""Triton kernels of permute and unpermute: one launch each, every row read and written once.

    spread             a token to the positions of its pairs          reads T rows, writes P
    combine            the rows of a token, weighted, summed in fp32  reads P rows, writes T
    combine_backward   gradients of the rows and of their weights     reads T + P rows, writes P

Positions from the number of rows on belong to dropped pairs. As in triton_softmax.py, parameters
are annotated for Triton's compiler, and with TRITON_INTERPRET=1 the kernels run on CPU tensors.

    T tokens   K experts per token   P permuted tokens   H hidden
"""

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
        """Write the row of a token to the positions of its topk pairs."""
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
        """out[token] = sum over its topk rows, times their weights; rows [num_rows, width].

        A position of at least num_rows is a dropped pair, which adds 0.
        """
        token = tl.program_id(0).to(tl.int64)
        columns = tl.program_id(1) * block + tl.arange(0, block)
        inside = columns < width
        total = tl.zeros([block], tl.float32)
        for k in range(topk):
            pair = token * topk + k
            row = tl.load(positions + pair)
            mask = inside & (row < num_rows)
            values = tl.load(rows + row * width + columns, mask=mask, other=0.0).to(tl.float32)
            if is_weighted:
                values *= tl.load(weights + pair)
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
        """Gradients of the row and of the weight of one (token, expert) pair."""
        # pairs of a token run together and read its gradient from the cache
        pair = tl.program_id(0).to(tl.int64)
        row = tl.load(positions + pair)
        weight = tl.load(weights + pair)
        along = tl.zeros([block], tl.float32)
        for start in range(0, width, block):
            columns = start + tl.arange(0, block)
            inside = (columns < width) & (row < num_rows)
            token_offsets = pair // topk * width + columns
            row_offsets = row * width + columns
            token_grad = tl.load(grad + token_offsets, mask=inside, other=0.0).to(tl.float32)
            values = tl.load(rows + row_offsets, mask=inside, other=0.0).to(tl.float32)
            along += values * token_grad
            row_grad = token_grad * weight
            tl.store(grad_rows + row_offsets, row_grad.to(grad_rows.dtype.element_ty), mask=inside)
        tl.store(grad_weights + pair, tl.sum(along, 0))


def spread(x: Tensor, order: Tensor, *, inverse: Tensor) -> Tensor:
    """[T, H] -> [P, H], each token at its positions in `inverse` [T, K] below P = len(order)."""
    width = x.shape[1]
    out = x.new_empty(len(order), width)
    if out.numel():
        _spread[_grid(inverse, width)](
            x.contiguous(),
            inverse.contiguous(),
            out,
            len(out),
            width,
            topk=inverse.shape[1],
            block=BLOCK,
        )
    return out


def combine(permuted: Tensor, inverse: Tensor, *, weights: Tensor | None) -> Tensor:
    """[P, H] -> [T, H]: the sum of the rows at each token's positions.

    Rows are multiplied by weights [T, K] fp32 where they are given.
    """
    width = permuted.shape[1]
    out = permuted.new_empty(len(inverse), width)
    if out.numel():
        permuted = permuted.contiguous()
        _combine[_grid(inverse, width)](
            permuted,
            inverse.contiguous(),
            permuted if weights is None else weights.contiguous(),
            out,
            len(permuted),
            width,
            topk=inverse.shape[1],
            is_weighted=weights is not None,
            block=BLOCK,
        )
    return out


def combine_backward(
    grad: Tensor, permuted: Tensor, *, order: Tensor, inverse: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of `combine`: [P, H] of the rows and [T, K] fp32 of the weights."""
    permuted = permuted.contiguous()
    weights = weights.contiguous()
    grad_rows = torch.empty_like(permuted)
    grad_weights = torch.empty_like(weights)
    num_pairs = inverse.numel()
    if num_pairs:
        _combine_backward[(num_pairs,)](
            grad.contiguous(),
            permuted,
            inverse.contiguous(),
            weights,
            grad_rows,
            grad_weights,
            len(permuted),
            permuted.shape[1],
            topk=inverse.shape[1],
            block=BLOCK,
        )
    return grad_rows, grad_weights


def _grid(inverse: Tensor, width: int) -> tuple[int, int]:
    """A program per token and block of columns."""
    return len(inverse), triton.cdiv(width, BLOCK)
