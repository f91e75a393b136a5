"""Permutation of tokens to expert order and back.

    plan_permutation   the order of (token, expert) pairs sorted by expert
    permute            tokens -> permuted tokens, one per pair
    unpermute          permuted tokens -> tokens, the weighted sum over the experts of a token
    reorder            permuted tokens in another order; `inverse_of` gives the inverse

    topk_ids (T=2, K=2)   [[2, 0], [0, 1]]
    permuted              expert 0 | expert 0 | expert 1 | expert 2
      order               pair 1   | pair 2   | pair 3   | pair 0     (pair // K is the token)
    inverse               [[3, 0], [1, 2]]                            the position of each pair

Forward and backward only gather by index: a scatter-add on CUDA would sum in a different order at every run. Sums over
the experts of a token are in fp32.

    T tokens   K experts per token   E experts   P permuted tokens   H hidden
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Permutation:
    """The order of the (token, expert) pairs of a batch."""

    order: Tensor  # [T * K] int64, the pair at each position; dropped pairs last
    inverse: Tensor  # [T, K] int64, the position of each pair
    tokens_per_expert: Tensor  # [E] int64


def plan_permutation(topk_ids: Tensor, num_experts: int) -> Permutation:
    """Sort the pairs of topk_ids [T, K] int64 by expert; the sort is stable and `num_experts` marks a dropped pair."""
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


def permute(x: Tensor, permutation: Permutation, *, num_permuted: int) -> Tensor:
    """[T, H] -> [P, H]; `num_permuted` is P, either all pairs or those that are not dropped."""
    permuted: Tensor = _Permute.apply(x, permutation.order[:num_permuted], permutation.inverse)
    return permuted


def reorder(permuted: Tensor, order: Tensor) -> Tensor:
    """[P, H] in the order of a permutation [P] int64."""
    reordered: Tensor = _Permute.apply(permuted, order, inverse_of(order)[:, None])
    return reordered


def unpermute(permuted: Tensor, permutation: Permutation, *, topk_weights: Tensor) -> Tensor:
    """The expert outputs of each token, weighted and summed in fp32.

    Args:
        permuted: [P, H]; P is all pairs or those that are not dropped. Dropped pairs must be zero.
        permutation: the one of `permute`.
        topk_weights: [T, K] fp32.

    Returns:
        [T, H] in the dtype of `permuted`.
    """
    out: Tensor = _Unpermute.apply(permuted, topk_weights, permutation.order[: len(permuted)], permutation.inverse)
    return out


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order // inverse.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        padded = _Padded.of(grads[0], inverse)
        if inverse.shape[1] == 1:
            return padded.select(0), None, None
        total = padded.select(0).float()
        for k in range(1, inverse.shape[1]):
            total += padded.select(k)
        return total.to(grads[0].dtype), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, permuted: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(permuted, weights, order, inverse)
        padded = _Padded.of(permuted, inverse)
        total = padded.select(0) * weights[:, :1]
        for k in range(1, inverse.shape[1]):
            total += padded.select(k) * weights[:, k, None]
        return total.to(permuted.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        permuted, weights, order, inverse = ctx.saved_tensors
        grad, padded = grads[0], _Padded.of(permuted, inverse)
        grad_permuted = grad.index_select(0, order // inverse.shape[1]) * weights.flatten()[order, None]
        grad_weights = [(padded.select(k) * grad.float()).sum(-1) for k in range(inverse.shape[1])]
        return grad_permuted.to(permuted.dtype), torch.stack(grad_weights, dim=1), None, None


@dataclass(frozen=True)
class _Padded:
    """Permuted tokens, with zeros at the end for all dropped pairs."""

    permuted: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, permuted: Tensor, inverse: Tensor) -> "_Padded":
        if len(permuted) == inverse.numel():
            return cls(permuted, inverse)
        return cls(F.pad(permuted, (0, 0, 0, 1)), inverse.clamp(max=len(permuted)))

    def select(self, k: int) -> Tensor:
        """[T, H], the permuted tokens of every token's k-th expert."""
        return self.permuted.index_select(0, self.inverse[:, k])
