"""Permutation of tokens into the order of their experts, and the weighted sum back.

    plan_permutation   the positions of the (token, expert) pairs, sorted by expert
    permute            tokens to their positions
    reorder            the same for rows that have one position each
    unpermute          the rows of each token, weighted and summed
    PermuteForm        the operations by torch's operators or by Triton kernels (triton_permute.py)

    topk_ids (T=2, K=2)   [[2, 0], [0, 1]]
    permuted              expert 0 | expert 0 | expert 1 | expert 2
      order               pair 1   | pair 2   | pair 3   | pair 0     (pair // K is the token)
    inverse               [[3, 0], [1, 2]]                            the position of each pair

torch's form only gathers by index, forward and backward: a scatter-add on CUDA would sum in a
different order at every run. Triton's form writes every row once, and sums in the order of k. Sums
over the experts of a token are in fp32.

    T tokens   K experts per token   E experts   P permuted tokens   H hidden
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.kernels.compiler import runs_triton


@dataclass(frozen=True)
class Permutation:
    """The order of the (token, expert) pairs of a batch."""

    order: Tensor  # [T * K] int64, the pair at each position; dropped pairs last
    inverse: Tensor  # [T, K] int64, the position of each pair
    bounds: Tensor  # [E + 1] int32, zero and the end of each expert's pairs

    @property
    def offs(self) -> Tensor:
        """[E] int32, the end of each expert's pairs."""
        return self.bounds[1:]

    @cached_property
    def tokens_per_expert(self) -> Tensor:
        """[E] int32."""
        return self.bounds.diff()


def plan_permutation(topk_ids: Tensor, num_experts: int) -> Permutation:
    """Sort the pairs of topk_ids [T, K] int64 by expert.

    The sort is stable, and `num_experts` marks a dropped pair.
    """
    experts, order = topk_ids.flatten().sort(stable=True)
    numbers = torch.arange(-1, num_experts, device=experts.device)
    bounds = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    inverse = inverse_of(order).view_as(topk_ids)
    return Permutation(order, inverse, bounds)


def inverse_of(order: Tensor) -> Tensor:
    """The inverse of a permutation [n] int64.

    >>> inverse_of(torch.tensor([2, 0, 1])).tolist()
    [1, 2, 0]
    """
    positions = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, positions)


def permute(
    x: Tensor, permutation: Permutation, *, num_permuted: int, ahead: Tensor | None = None
) -> Tensor:
    """[T, H] -> [P, H].

    Args:
        x: tokens.
        permutation: the order of their pairs.
        num_permuted: P, the number of all pairs or of kept pairs.
        ahead: at least P rows of `permute_ahead`; None: computed here.
    """
    order = permutation.order[:num_permuted]
    permuted: Tensor = _Permute.apply(x, order, permutation.inverse, ahead)
    return permuted


@torch.no_grad()
def permute_ahead(x: Tensor, permutation: Permutation, *, most: int) -> Tensor:
    """The first `most` rows of `permute`, queued before the number of kept pairs is known."""
    return form_of(x).spread(x, permutation.order[:most], inverse=permutation.inverse)


def reorder(permuted: Tensor, order: Tensor, *, inverse: Tensor) -> Tensor:
    """[P, H] in the order of a permutation [P] int64; `inverse` is its inverse."""
    reordered: Tensor = _Permute.apply(permuted, order, inverse[:, None], None)
    return reordered


def unpermute(permuted: Tensor, permutation: Permutation, *, topk_weights: Tensor) -> Tensor:
    """The expert outputs of each token, weighted and summed in fp32.

    Args:
        permuted: [P, H], all pairs or kept pairs; dropped pairs must be zero.
        permutation: the one of `permute`.
        topk_weights: [T, K] fp32.

    Returns:
        [T, H] in the dtype of `permuted`.
    """
    order = permutation.order[: len(permuted)]
    out: Tensor = _Unpermute.apply(permuted, topk_weights, order, permutation.inverse)
    return out


class _Permute(torch.autograd.Function):
    """Rows in the order of experts; the backward sums the gradients of a token's pairs."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, ahead: Tensor | None
    ) -> Tensor:
        """x [T, H] -> [P, H], the row of the token of each pair in `order` [P]."""
        ctx.save_for_backward(inverse)
        if ahead is not None:
            return ahead[: len(order)]
        return form_of(x).spread(x, order, inverse=inverse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """[P, H] -> [T, H], the sum over the pairs of each token."""
        (inverse,) = ctx.saved_tensors
        return form_of(grads[0]).combine(grads[0], inverse, weights=None), None, None, None


class _Unpermute(torch.autograd.Function):
    """Weighted sums of the rows of each token, with gradients of rows and weights."""

    @staticmethod
    def forward(
        ctx: Any, permuted: Tensor, weights: Tensor, order: Tensor, inverse: Tensor
    ) -> Tensor:
        """[P, H] -> [T, H], the weighted sum over the pairs of each token."""
        ctx.save_for_backward(permuted, weights, order, inverse)
        return form_of(permuted).combine(permuted, inverse, weights=weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """The gradients of the rows [P, H] and of the weights [T, K]."""
        permuted, weights, order, inverse = ctx.saved_tensors
        grad_permuted, grad_weights = form_of(permuted).combine_backward(
            grads[0], permuted, order=order, inverse=inverse, weights=weights
        )
        return grad_permuted, grad_weights, None, None


@dataclass(frozen=True)
class PermuteForm:
    """The operations of a permutation."""

    spread: Callable[..., Tensor]  # [T, H] -> [P, H]
    # [P, H], with weights [T, K] fp32 or without -> [T, H]; dropped pairs add nothing
    combine: Callable[..., Tensor]
    # gradient [T, H] -> gradients [P, H] and [T, K] of permuted tokens and weights
    combine_backward: Callable[..., tuple[Tensor, Tensor]]


def _spread(x: Tensor, order: Tensor, *, inverse: Tensor) -> Tensor:
    return x.index_select(0, order // inverse.shape[1])


def _combine(permuted: Tensor, inverse: Tensor, *, weights: Tensor | None) -> Tensor:
    """The sum of each token's K rows in fp32 (the dtype of `weights`), rounded once."""
    first, *others = range(inverse.shape[1])
    selected = _expert_outputs(permuted, inverse)
    total = next(selected)
    if weights is not None:
        total = total * weights[:, first, None]
    elif others:
        total = total.float()
    for k, rows in zip(others, selected, strict=True):
        total += rows if weights is None else rows * weights[:, k, None]
    return total.to(permuted.dtype)


def _combine_backward(
    grad: Tensor, permuted: Tensor, *, order: Tensor, inverse: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the rows [P, H] and of the weights [T, K]; grad is [T, H]."""
    grad_permuted = grad.index_select(0, order // inverse.shape[1]) * weights.flatten()[order, None]
    grad_weights = []
    for rows in _expert_outputs(permuted, inverse):
        grad_weights.append((rows * grad.float()).sum(-1))
    return grad_permuted.to(permuted.dtype), torch.stack(grad_weights, dim=1)


def _expert_outputs(permuted: Tensor, inverse: Tensor) -> Iterator[Tensor]:
    """For each k, [T, H] outputs of every token's k-th expert; zeros for dropped pairs."""
    num_permuted = len(permuted)
    if num_permuted < inverse.numel():
        permuted = F.pad(permuted, (0, 0, 0, 1))
        inverse = inverse.clamp(max=num_permuted)
    for positions in inverse.unbind(1):
        yield permuted.index_select(0, positions)


TORCH_FORM = PermuteForm(_spread, _combine, _combine_backward)


def form_of(x: Tensor) -> PermuteForm:
    """The permute operations for tokens like `x`: Triton on GPUs, torch elsewhere."""
    return triton_form() if runs_triton(x) else TORCH_FORM


@cache
def triton_form() -> PermuteForm:
    """One kernel per operation."""
    from nanotrain.kernels import triton_permute as kernels

    return PermuteForm(kernels.spread, kernels.combine, kernels.combine_backward)
