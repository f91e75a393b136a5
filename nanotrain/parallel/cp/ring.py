"""Ring attention: keys and values travel around the cp group while every rank attends to the chunk it has.

In step i rank r attends to the keys of rank s = (r - i) mod cp. With zigzag shards every step has the same cost on
every rank, and only step 0 needs a mask:

    s = r    all queries        x local keys, causal               rank 1 of 3 holds chunks 1 and 4
    s < r    all queries        x the first chunk of keys          (the second lies after all queries)
    s > r    the second chunk   x both chunks of keys              (the first chunk lies before all keys)

    forward     cp - 1 send-receives of keys and values; results are merged by their log-sum-exp
    backward    cp - 1 send-receives of keys and values, and cp of their gradients, which are accumulated in fp32 one
                step behind and end on the rank of their keys

    RingStep, plan_ring   the order of computation of a rank (pure)
    RingAttention         the core attention; _Ring: its forward and backward

Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", section 3. Zigzag: Brandon et al., "Striped
Attention", with chunks instead of single tokens.

    B batch   S sequence   L = S / cp   N query heads   G key/value heads   D, Dv head dims
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanotrain.comm.group import Group
from nanotrain.comm.send_recv import start_ring_send_recv
from nanotrain.comm.work import Work
from nanotrain.parallel.cp.chunk_attention import (
    AttentionChunk,
    AttentionResult,
    accumulate_dtype,
    chunk_backward,
    chunk_forward,
    merge_log_sum_exp,
)
from nanotrain.parallel.cp.max_logits import LogitObserver
from nanotrain.parallel.cp.scores import ScoreOptions, add_sink, sink_grad
from nanotrain.parallel.cp.sdpa import causal_mask
from nanotrain.parallel.cp.split import local_positions, stack_shards


@dataclass(frozen=True)
class RingStep:
    """Attention of the local `queries` to the `keys` of rank `source`, as slices of the L local positions of each."""

    source: int
    queries: slice
    keys: slice
    is_causal: bool


@dataclass(frozen=True)
class RingMask:
    """What the mask of a step is made from."""

    # [B, S] of full sequences, equal within a segment; None where attention crosses segments
    segment_ids: Tensor | None
    positions: Tensor  # [cp, L], of the tokens of every rank in their sequence
    window: int | None  # keys before its own that a query attends to; None for all of them


def plan_ring(index: int, size: int, *, length: int) -> tuple[RingStep, ...]:
    """The steps of rank `index` with `length` local positions (L), in the order in which keys are received."""
    both, first, second = slice(0, length), slice(0, length // 2), slice(length // 2, length)
    steps = [RingStep(index, both, both, is_causal=True)]
    for distance in range(1, size):
        source = (index - distance) % size
        queries, keys = (both, first) if source < index else (second, both)
        steps.append(RingStep(source, queries, keys, is_causal=False))
    return tuple(steps)


class RingAttention:
    """Causal attention with keys and values sent around the ring."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def plan_mask(self, segment_ids: Tensor | None, *, tokens: Tensor, window: int | None = None) -> RingMask | None:
        """What every step makes its mask from; None for causal."""
        if segment_ids is None and window is None:
            return None
        length = tokens.shape[1] * self.group.size
        positions = stack_shards(torch.arange(length, device=tokens.device)[None], size=self.group.size)[:, 0]
        return RingMask(segment_ids, positions, window)

    def __call__(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        mask: RingMask | None,
        observe: LogitObserver | None = None,
        scores: ScoreOptions | None = None,
    ) -> Tensor:
        """Attend to all keys of the group, one step at a time."""
        sink = None if scores is None else scores.sink
        out: Tensor = _Ring.apply(query, key, value, sink, mask, self.group, observe, scores)
        return out


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        *rest: Any,
    ) -> Tensor:
        mask, group, observe, scores = rest
        ring = _LocalQueries(query.transpose(1, 2), mask, group, scores)
        total: AttentionResult | None = None
        for step, keys, values in ring.receive(key, value):
            chunk = ring.chunk(step, key=keys, value=values)
            if observe is not None:
                observe(chunk)
            part = chunk_forward(chunk)
            if total is None:
                total = AttentionResult(part.out.to(accumulate_dtype(part.out)), part.lse.clone())
            else:
                merge_log_sum_exp(total.queries(step.queries), part)
        assert total is not None, "a ring has at least the step with the local keys"
        total = add_sink(total, sink)
        out = total.out.to(query.dtype)
        ctx.group, ctx.mask, ctx.scores = group, mask, None if scores is None else replace(scores, sink=None)
        ctx.save_for_backward(query, key, value, sink, out, total.lse)
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sink, out, lse = ctx.saved_tensors
        ring = _LocalQueries(query.transpose(1, 2), ctx.mask, ctx.group, ctx.scores)
        merged, grad = AttentionResult(out, lse), grads[0].transpose(1, 2)
        query_grad = torch.zeros_like(ring.query, dtype=accumulate_dtype(query))
        work: Work[tuple[Tensor, ...]] | None = None
        for step, keys, values in ring.receive(key, value):
            chunk = ring.chunk(step, key=keys, value=values)
            gradients = chunk_backward(chunk, merged.queries(step.queries), grad=grad[:, :, step.queries])
            query_grad[:, :, step.queries] += gradients.query
            # The sums of the previous ranks for these keys were in transit during the computation above.
            sums = _zeros(key, value) if work is None else work.wait()
            for total, part in zip(sums, (gradients.key, gradients.value), strict=True):
                total[:, step.keys] += part.transpose(1, 2)
            work = start_ring_send_recv(sums, ctx.group)
        assert work is not None, "a ring has at least the step with the local keys"
        key_grad, value_grad = work.wait()
        query_grad = query_grad.transpose(1, 2).to(query.dtype)
        inputs = query_grad, key_grad.to(key.dtype), value_grad.to(value.dtype)
        return *inputs, sink_grad(sink, merged, grad=grad), None, None, None, None


@dataclass(frozen=True)
class _LocalQueries:
    """The queries [B, N, L, D] of this rank, and what masks are made from where attention is not just causal."""

    query: Tensor
    mask: RingMask | None
    group: Group
    scores: ScoreOptions | None

    def receive(self, key: Tensor, value: Tensor) -> Iterator[tuple[RingStep, Tensor, Tensor]]:
        """Every step with the keys and values [B, L, G, ...] of its source; the next transfer starts beforehand."""
        current: tuple[Tensor, ...] = (key.contiguous(), value.contiguous())
        steps = plan_ring(self.group.index, self.group.size, length=self.query.shape[2])
        for step in steps:
            work = start_ring_send_recv(current, self.group) if step is not steps[-1] else None
            yield step, current[0], current[1]
            if work is not None:
                current = work.wait()

    def chunk(self, step: RingStep, *, key: Tensor, value: Tensor) -> AttentionChunk:
        """The attention of one step, from the keys and values of its source."""
        query = self.query[:, :, step.queries]
        key, value = (x[:, step.keys].transpose(1, 2) for x in (key, value))
        mask = self._mask(step)
        is_causal = step.is_causal and mask is None
        chunk = AttentionChunk(query, key, value, mask, is_causal, scale=self.query.shape[-1] ** -0.5)
        return chunk if self.scores is None else self._with_options(chunk, step, scores=self.scores)

    def _with_options(self, chunk: AttentionChunk, step: RingStep, *, scores: ScoreOptions) -> AttentionChunk:
        """A chunk with the options of the scores."""
        length, device = self.query.shape[2] * self.group.size, self.query.device
        queries, keys = (
            local_positions(length, index=index, size=self.group.size, device=device)
            for index in (self.group.index, step.source)
        )
        return scores.apply_to(chunk, queries=queries[step.queries], keys=keys[step.keys])

    def _mask(self, step: RingStep) -> Tensor | None:
        if self.mask is None:
            return None
        queries = self.mask.positions[self.group.index][step.queries]
        keys = self.mask.positions[step.source][step.keys]
        return causal_mask(self.mask.segment_ids, queries=queries, keys=keys, window=self.mask.window)


def _zeros(*like: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(x.shape, dtype=accumulate_dtype(x), device=x.device) for x in like)
