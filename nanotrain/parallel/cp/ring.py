"""Ring attention: keys and values are sent around the cp group while every rank attends to those it
holds.

In step i rank r attends to the keys of rank s = (r - i) mod cp. With zigzag shards every step has
the same cost on every rank, and only step 0 needs a mask:

    s = r    all queries        x local keys, causal               rank 1 of 3 holds chunks 1 and 4
    s < r    all queries        x the first chunk of keys          (the second lies after all queries)
    s > r    the second chunk   x both chunks of keys              (the first chunk lies before all keys)

    forward     cp - 1 send-receives of keys and values; results are merged by their log-sum-exp
    backward    cp - 1 send-receives of keys and values, and cp of their gradients, which are accumulated in fp32 one
                step behind and end on the rank of their keys

    plan_ring       the order of computation of a rank (pure)
    RingAttention   the core attention; _Ring: its forward and backward

Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", section 3. Zigzag: Brandon et
al., "Striped Attention", with chunks instead of single tokens.

    B batch   S sequence   L = S / cp   N query heads   G key/value heads   D, Dv head dims
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanotrain.attention.chunks import (
    AttentionResult,
    ScoreOptions,
    accumulate_dtype,
    add_sink,
    sink_grad,
)
from nanotrain.attention.sdpa import LayerKernels
from nanotrain.attention.tiles import (
    LocalChunk,
    Spans,
    Tile,
    TilePlan,
    forward_tiles,
    plan_chunks,
    tile_gradients,
)
from nanotrain.comm.autograd import eager
from nanotrain.comm.group import Group
from nanotrain.comm.send_recv import start_ring_send_recv
from nanotrain.comm.work import Work
from nanotrain.parallel.cp.split import stack_shards, zigzag_chunks


def plan_ring(index: int, size: int, *, length: int) -> list[tuple[int, Tile]]:
    """The steps of rank `index` with `length` local positions (L), in the order in which keys are
    received.

    Returns:
        the rank of the keys, and the attention of local queries to them.
    """
    samples, both, first, second = (
        slice(None),
        slice(0, length),
        slice(0, length // 2),
        slice(length // 2, length),
    )
    steps = [(index, Tile(samples, both, both, is_causal=True))]
    for distance in range(1, size):
        source = (index - distance) % size
        queries, keys = (both, first) if source < index else (second, both)
        steps.append((source, Tile(samples, queries, keys, is_first=False)))
    return steps


class RingAttention:
    """Causal attention with keys and values sent around the ring."""

    def __init__(self, group: Group, kernels: LayerKernels | None = None) -> None:
        # no kernels: the ring computes tiles, because it needs the log-sum-exp to merge results
        self.group = group

    def plan_mask(
        self, segment_ids: Tensor | None, *, tokens: Tensor, window: int | None = None
    ) -> tuple[TilePlan, ...]:
        """The tiles of every step."""
        local = tokens.shape[1]
        length, index, size = local * self.group.size, self.group.index, self.group.size
        positions = torch.arange(length, device=tokens.device)[None]
        of_ranks = stack_shards(positions, size=size)[:, 0]  # [cp, L]
        spans, plans = Spans.of(segment_ids, length=length, window=window), []
        for source, tile in plan_ring(index, size, length=local):
            queries, keys = of_ranks[index], of_ranks[source]
            if segment_ids is None and window is None:
                plans.append(TilePlan((tile,), queries, keys))
            else:
                pairs = _chunk_pairs(index, source, size=size, chunk=local // 2)
                plans.append(plan_chunks(spans, pairs, queries=queries, keys=keys))
        return tuple(plans)

    @eager  # transfers stay out of compiled graphs
    def __call__(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        mask: tuple[TilePlan, ...],
        scores: ScoreOptions | None,
    ) -> Tensor:
        """Attend to all keys of the group, one step at a time."""
        sink = None if scores is None else scores.sink
        out: Tensor = _Ring.apply(query, key, value, sink, mask, self.group, scores)
        return out


def _chunk_pairs(
    index: int, source: int, *, size: int, chunk: int
) -> list[tuple[LocalChunk, LocalChunk, bool]]:
    """The chunks of queries of rank `index` and of keys of rank `source` that attend to each other."""
    ours, theirs = (
        [
            LocalChunk(range(c * chunk, (c + 1) * chunk), i * chunk)
            for i, c in enumerate(zigzag_chunks(rank, size))
        ]
        for rank in (index, source)
    )
    pairs = [(q, k) for q in ours for k in theirs if k.positions.start <= q.positions.start]
    if source != index:
        return [(q, k, False) for q, k in pairs]
    # tiles of keys of the same chunk come first: every query has one
    pairs.sort(key=lambda pair: pair[0] != pair[1])
    return [(q, k, q == k) for q, k in pairs]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, *rest: Any
    ) -> Tensor:
        plans, group, scores = rest
        turned = query.transpose(1, 2)
        total: AttentionResult | None = None
        for plan, keys, values in _receive(plans, (key, value), group=group):
            inputs = (turned, keys, values)
            total = forward_tiles(plan, inputs, scores=scores, total=total)
            if total.out.dtype != accumulate_dtype(query):
                total = AttentionResult(total.out.to(accumulate_dtype(query)), total.lse)
        assert total is not None, "a ring has at least the step with the local keys"
        total = add_sink(total, sink)
        out = total.out.to(query.dtype)
        ctx.group, ctx.plans, ctx.scores = (
            group,
            plans,
            None if scores is None else replace(scores, sink=None),
        )
        ctx.save_for_backward(query, key, value, sink, out, total.lse)
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sink, out, lse = ctx.saved_tensors
        merged, grad, turned = (
            AttentionResult(out, lse),
            grads[0].transpose(1, 2),
            query.transpose(1, 2),
        )
        query_grad = torch.zeros_like(turned, dtype=accumulate_dtype(query))
        work: Work[tuple[Tensor, ...]] | None = None
        for plan, keys, values in _receive(ctx.plans, (key, value), group=ctx.group):
            inputs = (turned, keys, values)
            parts = list(tile_gradients(plan, inputs, merged=merged, scores=ctx.scores, grad=grad))
            # The sums of the previous ranks for these keys were in transit during the computation
            # above.
            sums = _zeros(key, value) if work is None else work.wait()
            for tile, part in parts:
                query_grad[tile.samples, :, tile.queries] += part.query
                for total, gradient in zip(sums, (part.key, part.value), strict=True):
                    total[tile.samples, tile.keys] += gradient.transpose(1, 2)
            work = start_ring_send_recv(sums, ctx.group)
        assert work is not None, "a ring has at least the step with the local keys"
        key_grad, value_grad = work.wait()
        query_grad = query_grad.transpose(1, 2).to(query.dtype)
        gradients = query_grad, key_grad.to(key.dtype), value_grad.to(value.dtype)
        return *gradients, sink_grad(sink, merged, grad=grad), None, None, None


def _receive(
    plans: tuple[TilePlan, ...], local: tuple[Tensor, ...], *, group: Group
) -> Iterator[tuple[TilePlan, Tensor, Tensor]]:
    """Every step with the keys and values [B, G, L, ...] of its source; the next transfer starts
    beforehand.
    """
    current = tuple(x.contiguous() for x in local)
    for plan in plans:
        work = start_ring_send_recv(current, group) if plan is not plans[-1] else None
        yield plan, current[0].transpose(1, 2), current[1].transpose(1, 2)
        if work is not None:
            current = work.wait()


def _zeros(*like: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(x.shape, dtype=accumulate_dtype(x), device=x.device) for x in like)
