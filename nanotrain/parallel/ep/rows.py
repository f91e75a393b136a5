"""Rows: one per choice of an expert by a token, sorted by expert.

    plan_rows    which row each choice gets
    permute      tokens -> rows
    combine      rows -> tokens: the weighted sum of a token's rows
    permute_by   rows in another order, `inverse_of` gives the way back

    choices (T=2, K=2)   experts [[2, 0], [0, 1]]
    rows                 expert 0 | expert 0 | expert 1 | expert 2
      order              choice 1 | choice 2 | choice 3 | choice 0     (choice // K is the token)
    places               [[3, 0], [1, 2]]                              the row of each choice

Forward and backward only ever gather by index: adding rows up by scattering would, on CUDA, sum in another order at
every run. Sums over a token's choices are in fp32.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class RowPlan:
    """Which row belongs to which choice.

    Args:
        order: [T * K] int64, the choice that stands at each row; dropped ones at the end.
        places: [T, K] int64, the row of each choice.
        counts: [E] int64, rows of each expert.
    """

    order: Tensor
    places: Tensor
    counts: Tensor


def plan_rows(experts: Tensor, num_experts: int) -> RowPlan:
    """Sort the choices by expert; a token's place among those of its expert is kept.

    Args:
        experts: [T, K] int64; `num_experts` marks a dropped choice.
        num_experts: E.
    """
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    counts = flat.new_zeros(num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))
    return RowPlan(order, inverse_of(order).view_as(experts), counts[:num_experts])


def inverse_of(order: Tensor) -> Tensor:
    """Where each number stands in a permutation [n] int64.

    >>> inverse_of(torch.tensor([2, 0, 1])).tolist()
    [1, 2, 0]
    """
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def permute(x: Tensor, plan: RowPlan, *, num_rows: int) -> Tensor:
    """[T, H] -> [num_rows, H]: the tokens of the first rows, all of them or those that were not dropped."""
    rows: Tensor = _Permute.apply(x, plan.order[:num_rows], plan.places)
    return rows


def permute_by(rows: Tensor, order: Tensor) -> Tensor:
    """[R, H] in the order of [R] int64, each row once."""
    permuted: Tensor = _Permute.apply(rows, order, inverse_of(order)[:, None])
    return permuted


def combine(rows: Tensor, plan: RowPlan, *, weights: Tensor) -> Tensor:
    """The answers of every token's experts, weighted and summed in fp32.

    Args:
        rows: [R, H]; R is all choices or those that were not dropped. Rows of dropped choices must be zero.
        plan: of these rows.
        weights: [T, K] fp32.

    Returns:
        [T, H] in the dtype of the rows.
    """
    out: Tensor = _Combine.apply(rows, weights, plan.order[: len(rows)], plan.places)
    return out


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, order // places.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        found = _Padded.of(grads[0], places)
        if places.shape[1] == 1:
            return found.column(0), None, None
        total = found.column(0).float()
        for choice in range(1, places.shape[1]):
            total += found.column(choice)
        return total.to(grads[0].dtype), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order, places)
        found = _Padded.of(rows, places)
        total = found.column(0) * weights[:, :1]
        for choice in range(1, places.shape[1]):
            total += found.column(choice) * weights[:, choice, None]
        return total.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weights, order, places = ctx.saved_tensors
        grad, found = grads[0], _Padded.of(rows, places)
        grad_rows = grad.index_select(0, order // places.shape[1]) * weights.flatten()[order, None]
        columns = [(found.column(choice) * grad.float()).sum(-1) for choice in range(places.shape[1])]
        return grad_rows.to(rows.dtype), torch.stack(columns, dim=1), None, None


@dataclass(frozen=True)
class _Padded:
    """Rows that answer with zero for choices that have none."""

    rows: Tensor
    places: Tensor

    @classmethod
    def of(cls, rows: Tensor, places: Tensor) -> "_Padded":
        if len(rows) == places.numel():
            return cls(rows, places)
        return cls(F.pad(rows, (0, 0, 0, 1)), places.clamp(max=len(rows)))

    def column(self, choice: int) -> Tensor:
        """[T, H], the rows of every token's choice of that number."""
        return self.rows.index_select(0, self.places[:, choice])
