"""Tokens to their experts and back.

rows.py          which row belongs to which choice; permute and combine on one rank
LocalDispatch    every expert is whole on this rank: permute, run, combine
RemoteDispatch   experts lie on other ranks (ep), or in slices on several (etp):

    permute    rows sorted by expert, so those for one rank lie together
    counts     how many rows go where; the only thing the host waits for
    ep         rows to the ranks that hold their experts, by all-to-all with uneven counts
    etp        every rank of a group that shares its experts gets the rows of all its members
    sort       rows arrive sorted by source; experts want them sorted by expert
    run        each rank's part of each expert
    ... and the same way back, where the partial results of an etp group are summed

T tokens of this rank   K experts per token   E experts   H hidden
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nanotrain.comm.all_to_all import all_to_all, start_all_to_all
from nanotrain.comm.collectives import all_gather_into
from nanotrain.comm.group import Group
from nanotrain.parallel.ep.rows import combine, inverse_of, permute, permute_by, plan_rows

# Runs this rank's experts: rows [R, H] sorted by expert, and where each expert's rows end, [E of this rank] int32.
RunExperts = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Choice:
    """Which experts each token goes to.

    Args:
        experts: [T, K] int64; the number of experts stands for a choice that was dropped.
        weights: [T, K] fp32, what each expert's answer is multiplied by.
    """

    experts: Tensor
    weights: Tensor


class Dispatch(Protocol):
    """How a rank's tokens get through the experts.

    Attributes:
        keeps_dropped: whether rows of dropped choices stay, behind those of the last expert.
    """

    keeps_dropped: bool

    def __call__(self, x: Tensor, choice: Choice, *, run: RunExperts) -> Tensor:
        """[T, H] -> [T, H]: the weighted sum of the answers of every token's experts."""


def build_dispatch(num_experts: int, *, ep: Group, etp: Group) -> Dispatch:
    """The dispatch for experts that are spread over `ep` and sliced over `etp`; on this rank alone, without either."""
    if ep.size * etp.size == 1:
        return LocalDispatch(num_experts)
    return RemoteDispatch(num_experts, ep=ep, etp=etp)


class LocalDispatch:
    """All experts are here, and the host waits for nothing, not even to learn how many choices were dropped."""

    keeps_dropped = True

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts

    def __call__(self, x: Tensor, choice: Choice, *, run: RunExperts) -> Tensor:
        """[T, H] -> [T, H]."""
        plan = plan_rows(choice.experts, self._num_experts)
        rows = permute(x, plan, num_rows=choice.experts.numel())
        return combine(run(rows, _ends(plan.counts)), plan, weights=choice.weights)


class RemoteDispatch:
    """Experts lie on several ranks; member i of `ep` holds the i-th equal share of them."""

    keeps_dropped = False

    def __init__(self, num_experts: int, *, ep: Group, etp: Group) -> None:
        assert num_experts % ep.size == 0, "every rank of ep holds as many experts"
        self._num_experts, self._ep, self._etp = num_experts, ep, etp

    def __call__(self, x: Tensor, choice: Choice, *, run: RunExperts) -> Tensor:
        """[T, H] -> [T, H]."""
        plan = plan_rows(choice.experts, self._num_experts)
        traffic = self._agree(plan.counts)
        rows = permute(x, plan, num_rows=sum(traffic.to_ranks))
        rows = all_to_all(rows, self._ep, input_splits=traffic.to_ranks, output_splits=traffic.from_ranks)
        rows = _gather_slices(rows, self._etp, counts=traffic.from_members)
        order = _by_expert(traffic.arriving, num_rows=sum(traffic.from_members))
        rows = permute_by(rows, order)
        rows = run(rows, _ends(traffic.arriving.sum(0)))
        rows = permute_by(rows, inverse_of(order))
        rows = _sum_slices(rows, self._etp, counts=traffic.from_members)
        rows = all_to_all(rows, self._ep, input_splits=traffic.from_ranks, output_splits=traffic.to_ranks)
        return combine(rows, plan, weights=choice.weights)

    def _agree(self, counts: Tensor) -> "_Traffic":
        """Tell every rank how many rows of each expert it will get: [E] int64, this rank's rows per expert."""
        leaving = counts.view(self._ep.size, -1)
        arriving, ones = torch.zeros_like(leaving), [1] * self._ep.size
        start_all_to_all(arriving, leaving, input_splits=ones, output_splits=ones, group=self._ep).wait()
        everyone = arriving.new_zeros((self._etp.size, *arriving.shape))
        all_gather_into(everyone, arriving, group=self._etp)
        numbers = torch.cat([leaving.sum(1), arriving.sum(1), everyone.sum((1, 2))]).tolist()
        size = self._ep.size
        return _Traffic(numbers[:size], numbers[size : 2 * size], numbers[2 * size :], everyone.flatten(0, 1))


@dataclass(frozen=True)
class _Traffic:
    """Rows on their way.

    Args:
        to_ranks: rows for each member of ep.
        from_ranks: rows from each member of ep.
        from_members: rows that each member of etp has received from its ep group.
        arriving: [etp x ep, E of this rank] int64, rows of each expert by where they came from.
    """

    to_ranks: list[int]
    from_ranks: list[int]
    from_members: list[int]
    arriving: Tensor


def _gather_slices(rows: Tensor, group: Group, *, counts: list[int]) -> Tensor:
    """Every member's rows, in the order of the group; the gradients of all members' copies of a row are summed."""
    if group.size == 1:
        return rows
    copies = rows.repeat(group.size, 1)  # torch has no all-gather of uneven counts; this sends the same bytes
    return all_to_all(copies, group, input_splits=[len(rows)] * group.size, output_splits=counts)


def _sum_slices(rows: Tensor, group: Group, *, counts: list[int]) -> Tensor:
    """The reverse: rows of all members [sum(counts), H] -> the own rows, every member's part of them summed."""
    if group.size == 1:
        return rows
    own = [counts[group.index]] * group.size
    parts = all_to_all(rows, group, input_splits=counts, output_splits=own)
    return parts.view(group.size, own[0], -1).sum(0)


def _by_expert(arriving: Tensor, *, num_rows: int) -> Tensor:
    """Rows sorted by source, then expert -> the order that sorts them by expert: [num_rows] int64."""
    experts = torch.arange(arriving.shape[1], device=arriving.device).repeat(len(arriving))
    return experts.repeat_interleave(arriving.flatten(), output_size=num_rows).argsort(stable=True)


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0).to(torch.int32)
