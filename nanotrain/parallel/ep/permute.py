"""Permutation of tokens to expert order and back.

    plan_permutation   the order of (token, expert) pairs sorted by expert
    permute            tokens [T, H] -> one row per pair, sorted by expert
    unpermute          rows -> tokens: the weighted sum of the rows of a token
    reorder            rows in another order; `inverse_of` gives the inverse

    topk_ids (T=2, K=2)   [[2, 0], [0, 1]]
    permuted              expert 0 | expert 0 | expert 1 | expert 2
      order               pair 1   | pair 2   | pair 3   | pair 0     (pair // K is the token)
    inverse               [[3, 0], [1, 2]]                            the row of each pair

Forward and backward only gather by index: a scatter-add on CUDA would sum in a different order at every run. Sums over
the experts of a token are in fp32.

    T tokens   K experts per token   E experts   R rows   H hidden
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Permutation:
    """The order of the (token, expert) pairs of a batch.

    Args:
        order: [T * K] int64, the pair at each row; dropped pairs last.
        inverse: [T, K] int64, the row of each pair.
        tokens_per_expert: [E] int64.
    """

    order: Tensor
    inverse: Tensor
    tokens_per_expert: Tensor


def plan_permutation(topk_ids: Tensor, num_experts: int) -> Permutation:
    """Sort pairs by expert; the sort is stable.

    Args:
        topk_ids: [T, K] int64; `num_experts` marks a dropped pair.
        num_experts: E.
    """
    flat = topk_ids.flatten()
    order = flat.argsort(stable=True)
    counts = flat.new_zeros(num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))
    return Permutation(order, inverse_of(order).view_as(topk_ids), counts[:num_experts])


def inverse_of(order: Tensor) -> Tensor:
    """The inverse of a permutation [n] int64.

    >>> inverse_of(torch.tensor([2, 0, 1])).tolist()
    [1, 2, 0]
    """
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def permute(x: Tensor, permutation: Permutation, *, num_rows: int) -> Tensor:
    """[T, H] -> [num_rows, H]: the tokens of the first rows, either all or those that are not dropped."""
    rows: Tensor = _Permute.apply(x, permutation.order[:num_rows], permutation.inverse)
    return rows


def reorder(rows: Tensor, order: Tensor) -> Tensor:
    """[R, H] in the order of a permutation [R] int64."""
    reordered: Tensor = _Permute.apply(rows, order, inverse_of(order)[:, None])
    return reordered


def unpermute(rows: Tensor, permutation: Permutation, *, topk_weights: Tensor) -> Tensor:
    """The expert outputs of each token, weighted and summed in fp32.

    Args:
        rows: [R, H]; R is all pairs or those that are not dropped. Rows of dropped pairs must be zero.
        permutation: of these rows.
        topk_weights: [T, K] fp32.

    Returns:
        [T, H] in the dtype of the rows.
    """
    out: Tensor = _Unpermute.apply(rows, topk_weights, permutation.order[: len(rows)], permutation.inverse)
    return out


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order // inverse.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        padded = _PaddedRows.of(grads[0], inverse)
        if inverse.shape[1] == 1:
            return padded.select(0), None, None
        total = padded.select(0).float()
        for k in range(1, inverse.shape[1]):
            total += padded.select(k)
        return total.to(grads[0].dtype), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order, inverse)
        padded = _PaddedRows.of(rows, inverse)
        total = padded.select(0) * weights[:, :1]
        for k in range(1, inverse.shape[1]):
            total += padded.select(k) * weights[:, k, None]
        return total.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weights, order, inverse = ctx.saved_tensors
        grad, padded = grads[0], _PaddedRows.of(rows, inverse)
        grad_rows = grad.index_select(0, order // inverse.shape[1]) * weights.flatten()[order, None]
        grad_weights = [(padded.select(k) * grad.float()).sum(-1) for k in range(inverse.shape[1])]
        return grad_rows.to(rows.dtype), torch.stack(grad_weights, dim=1), None, None


@dataclass(frozen=True)
class _PaddedRows:
    """Rows with a zero row at the end that stands for all dropped pairs."""

    rows: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, rows: Tensor, inverse: Tensor) -> "_PaddedRows":
        if len(rows) == inverse.numel():
            return cls(rows, inverse)
        return cls(F.pad(rows, (0, 0, 0, 1)), inverse.clamp(max=len(rows)))

    def select(self, k: int) -> Tensor:
        """[T, H], the row of every token's k-th expert."""
        return self.rows.index_select(0, self.inverse[:, k])
