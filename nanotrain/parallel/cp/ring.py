"""Keys and values are passed around cp; every rank attends to what is here while the next are on their way.

In step i rank r has the keys of rank s = (r - i) mod cp. With the zigzag a step is one block without a mask (but for
the first, causal over the own positions) and costs every rank the same:

    s = r    all queries       x own keys, causal                rank 1 of 3 holds chunks 1 and 4
    s < r    all queries       x the early chunk of keys         (the late one lies behind all of them)
    s > r    the late queries  x both chunks of keys             (the early ones lie before all of them)

    forward     keys and values take cp - 1 hops; outputs are put together by their log-sum-exp
    backward    they take cp - 1 hops again; their gradients, summed in fp32, follow one hop behind and take cp, the
                last of them home

    Step, plan_steps   pure: what a rank does in which order
    RingCore           the core
    _Ring              its forward and backward by hand

Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", section 3; the zigzag is Brandon et al.'s
"Striped Attention" for chunks instead of single tokens.

    B batch   L = S / cp positions here   N query heads   G key/value heads   D, Dv widths of a head
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanotrain.comm.group import Group
from nanotrain.comm.send_recv import start_ring_send_recv
from nanotrain.comm.work import Work
from nanotrain.parallel.cp.blocks import Attended, Block, Running, attend_block, block_gradients, sum_dtype
from nanotrain.parallel.cp.split import zigzag_order


@dataclass(frozen=True)
class Step:
    """One block: the queries in `rows` of this rank against the keys in `columns` of rank `source`."""

    source: int
    rows: slice
    columns: slice
    is_causal: bool


def plan_steps(index: int, size: int, *, length: int) -> tuple[Step, ...]:
    """The blocks of member `index` in the order in which their keys arrive.

    Args:
        index: place in the cp group.
        size: of the group.
        length: positions that a rank holds.
    """
    everything, early, late = slice(0, length), slice(0, length // 2), slice(length // 2, length)
    steps = [Step(index, everything, everything, is_causal=True)]
    for hop in range(1, size):
        source = (index - hop) % size
        rows, columns = (everything, early) if source < index else (late, everything)
        steps.append(Step(source, rows, columns, is_causal=False))
    return tuple(steps)


class RingAttention:
    """Attention with keys and values passed around."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def plan_mask(self, segment_ids: Tensor | None, *, tokens: Tensor) -> Tensor | None:
        """[cp, B, L], the document ids of what each rank holds; every block makes its own mask of them."""
        return None if segment_ids is None else zigzag_order(segment_ids, size=self.group.size)

    def __call__(self, query: Tensor, *, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attend to all keys of the group, one step at a time."""
        out: Tensor = _Ring.apply(query, key, value, mask, self.group)
        return out


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ids: Tensor | None, group: Group) -> Tensor:
        turns = _Turns(query.transpose(1, 2), ids, group)
        running: Running | None = None
        for step, keys, values in turns.with_keys(key, value):
            part = attend_block(turns.block(step, key=keys, value=values))
            if running is None:
                running = Running(part)
            else:
                running.add(part, step.rows)
        assert running is not None, "the first step, with the own keys, is always there"
        out = running.out.to(query.dtype)
        ctx.group = group
        ctx.save_for_backward(query, key, value, ids, out, running.lse)
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, ids, out, lse = ctx.saved_tensors
        turns, whole, grad = _Turns(query.transpose(1, 2), ids, ctx.group), Attended(out, lse), grads[0].transpose(1, 2)
        by_query = torch.zeros_like(turns.query, dtype=sum_dtype(query))
        following: Work[tuple[Tensor, ...]] | None = None
        for step, keys, values in turns.with_keys(key, value):
            block = turns.block(step, key=keys, value=values)
            found = block_gradients(block, whole.rows(step.rows), grad=grad[:, :, step.rows])
            by_query[:, :, step.rows] += found.query
            # What earlier ranks have added for these keys travels while this rank computes its part.
            sums = _zeros(key, value) if following is None else following.wait()
            for total, part in zip(sums, (found.key, found.value), strict=True):
                total[:, step.columns] += part.transpose(1, 2)
            following = start_ring_send_recv(sums, ctx.group)
        assert following is not None, "the first step, with the own keys, is always there"
        by_key, by_value = following.wait()
        return by_query.transpose(1, 2).to(query.dtype), by_key.to(key.dtype), by_value.to(value.dtype), None, None


@dataclass(frozen=True)
class _Turns:
    """The steps of one rank over its queries [B, N, L, D]; `ids` [cp, B, L] where documents end attention."""

    query: Tensor
    ids: Tensor | None
    group: Group

    def with_keys(self, key: Tensor, value: Tensor) -> Iterator[tuple[Step, Tensor, Tensor]]:
        """Every step with the keys and values [B, L, G, ...] of its source; the next are sent for beforehand."""
        at_hand: tuple[Tensor, ...] = (key.contiguous(), value.contiguous())
        steps = plan_steps(self.group.index, self.group.size, length=self.query.shape[2])
        for step in steps:
            coming = start_ring_send_recv(at_hand, self.group) if step is not steps[-1] else None
            yield step, at_hand[0], at_hand[1]
            if coming is not None:
                at_hand = coming.wait()

    def block(self, step: Step, *, key: Tensor, value: Tensor) -> Block:
        """What is computed in one step, given the keys and values of its source."""
        query = self.query[:, :, step.rows]
        key, value = (x[:, step.columns].transpose(1, 2) for x in (key, value))
        mask = self._mask(step)
        is_causal = step.is_causal and mask is None
        return Block(query, key, value, mask, is_causal, scale=self.query.shape[-1] ** -0.5)

    def _mask(self, step: Step) -> Tensor | None:
        if self.ids is None:
            return None
        own, theirs = self.ids[self.group.index][:, step.rows], self.ids[step.source][:, step.columns]
        same = own[:, None, :, None] == theirs[:, None, None, :]
        return same.tril() if step.is_causal else same


def _zeros(*like: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(x.shape, dtype=sum_dtype(x), device=x.device) for x in like)
