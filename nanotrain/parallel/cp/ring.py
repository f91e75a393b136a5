"""Ring attention: keys and values travel around the cp group while every rank computes attention.

In step i rank r attends to the keys of rank s = (r - i) mod cp. With zigzag shards every step has
the same cost on every rank, and only step 0 needs a mask:

    s = r    all queries        x local keys, causal        rank 1 of 3 holds chunks 1 and 4
    s < r    all queries        x the first chunk of keys   (the second lies after all queries)
    s > r    the second chunk   x both chunks of keys       (the first chunk lies before all keys)

    forward     cp - 1 send-receives of keys and values; results are merged by their log-sum-exp
    backward    cp - 1 send-receives of keys and values, and cp of their gradients, which are
                accumulated in fp32 one step behind and end on the rank of their keys

    plan_ring       the order of computation of a rank (pure)
    RingAttention   the core attention; _Ring: its forward and backward

Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", section 3. Zigzag: Brandon et
al., "Striped Attention", with chunks instead of single tokens.

    B batch   S sequence   L = S / cp   N query heads   G key/value heads   D, Dv head dims
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanotrain.attention.chunk_kernels import AttentionResult
from nanotrain.attention.chunks import ScoreOptions, accumulate_dtype, add_sink, sink_grad
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


class RingStep(NamedTuple):
    """One step of a rank."""

    source: int  # rank of the keys
    tile: Tile  # attention of local queries to them


class ChunkPair(NamedTuple):
    """A chunk of queries, and a chunk of keys that the queries attend to."""

    queries: LocalChunk
    keys: LocalChunk
    is_first: bool  # whether the queries have no earlier tiles


class SourceTensors(NamedTuple):
    """The tiles of a step, with keys and values [B, G, L, ...] of its source."""

    plan: TilePlan
    key: Tensor
    value: Tensor


def plan_ring(index: int, size: int, *, length: int) -> list[RingStep]:
    """The steps of rank `index` in the order in which keys are received.

    Args:
        index: rank of the cp group.
        size: size of the cp group.
        length: local positions (L).
    """
    samples = slice(None)
    both = slice(0, length)
    first = slice(0, length // 2)
    second = slice(length // 2, length)
    steps = [RingStep(index, Tile(samples, both, both, is_causal=True))]
    for distance in range(1, size):
        source = (index - distance) % size
        queries, keys = (both, first) if source < index else (second, both)
        steps.append(RingStep(source, Tile(samples, queries, keys, is_first=False)))
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
        index = self.group.index
        size = self.group.size
        local_length = tokens.shape[1]
        length = local_length * size
        positions = torch.arange(length, device=tokens.device)[None]
        positions_by_rank = stack_shards(positions, size=size)[:, 0]  # [cp, L]
        queries = positions_by_rank[index]
        spans = Spans.of(segment_ids, length=length, window=window)
        plans = []
        for step in plan_ring(index, size, length=local_length):
            keys = positions_by_rank[step.source]
            if segment_ids is None and window is None:
                plans.append(TilePlan((step.tile,), queries, keys))
            else:
                pairs = _chunk_pairs(index, step.source, size=size, length=local_length // 2)
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


def _chunk_pairs(index: int, source: int, *, size: int, length: int) -> list[ChunkPair]:
    """The chunks of rank `index` as queries, with the chunks of rank `source` as keys."""
    query_chunks = _rank_chunks(index, size=size, length=length)
    key_chunks = _rank_chunks(source, size=size, length=length)
    diagonal = []
    earlier = []
    for queries in query_chunks:
        for keys in key_chunks:
            if keys == queries:
                diagonal.append(ChunkPair(queries, keys, is_first=True))
            elif keys.positions.start <= queries.positions.start:
                earlier.append(ChunkPair(queries, keys, is_first=False))
    # tiles of keys of the same chunk come first: every query has one
    return diagonal + earlier


def _rank_chunks(index: int, *, size: int, length: int) -> list[LocalChunk]:
    """The two chunks of a rank; `length` is the length of a chunk."""
    chunks = []
    for local, chunk in enumerate(zigzag_chunks(index, size)):
        positions = range(chunk * length, (chunk + 1) * length)
        chunks.append(LocalChunk(positions, local * length))
    return chunks


class _Ring(torch.autograd.Function):
    """Ring attention: each step attends to the keys and values of one rank.

    Queries [B, S, N, D], keys [B, S, G, D], values [B, S, G, Dv], sinks [N] or None, plans per
    step, group and score options -> [B, S, N, Dv], with S local tokens.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, *rest: Any
    ) -> Tensor:
        """Merge the results of all steps by their log-sum-exp."""
        plans, group, scores = rest
        head_major = query.transpose(1, 2)
        total: AttentionResult | None = None
        for source in _ring_steps(plans, (key, value), group=group):
            inputs = (head_major, source.key, source.value)
            total = forward_tiles(source.plan, inputs, scores=scores, total=total)
            if total.out.dtype != accumulate_dtype(query):
                total = AttentionResult(total.out.to(accumulate_dtype(query)), total.lse)
        assert total is not None, "a ring has at least the step with the local keys"
        total = add_sink(total, sink)
        out = total.out.to(query.dtype)
        ctx.group = group
        ctx.plans = plans
        ctx.scores = None if scores is None else replace(scores, sink=None)
        ctx.save_for_backward(query, key, value, sink, out, total.lse)
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Go around the ring again; gradients of keys and values travel with their rank's keys."""
        query, key, value, sink, out, lse = ctx.saved_tensors
        merged = AttentionResult(out, lse)
        grad = grads[0].transpose(1, 2)
        head_major = query.transpose(1, 2)
        query_grad = torch.zeros_like(head_major, dtype=accumulate_dtype(query))
        work: Work[tuple[Tensor, ...]] | None = None
        for source in _ring_steps(ctx.plans, (key, value), group=ctx.group):
            inputs = (head_major, source.key, source.value)
            parts = list(
                tile_gradients(source.plan, inputs, merged=merged, scores=ctx.scores, grad=grad)
            )
            # The sums of the previous ranks for these keys were in transit during the computation.
            if work is None:
                key_grad, value_grad = _zeros_like(key), _zeros_like(value)
            else:
                key_grad, value_grad = work.wait()
            for tile, part in parts:
                query_grad[tile.samples, :, tile.queries] += part.query
                key_grad[tile.samples, tile.keys] += part.key.transpose(1, 2)
                value_grad[tile.samples, tile.keys] += part.value.transpose(1, 2)
            work = start_ring_send_recv((key_grad, value_grad), ctx.group)
        assert work is not None, "a ring has at least the step with the local keys"
        key_grad, value_grad = work.wait()
        query_grad = query_grad.transpose(1, 2).to(query.dtype)
        gradients = (query_grad, key_grad.to(key.dtype), value_grad.to(value.dtype))
        return *gradients, sink_grad(sink, merged, grad=grad), None, None, None


def _ring_steps(
    plans: tuple[TilePlan, ...], local: tuple[Tensor, Tensor], *, group: Group
) -> Iterator[SourceTensors]:
    """Every step with the tensors of its source; the next transfer starts before the step."""
    key, value = (x.contiguous() for x in local)
    for plan in plans:
        is_last = plan is plans[-1]
        work = None if is_last else start_ring_send_recv((key, value), group)
        yield SourceTensors(plan, key.transpose(1, 2), value.transpose(1, 2))
        if work is not None:
            key, value = work.wait()


def _zeros_like(x: Tensor) -> Tensor:
    """Contiguous zeros in the dtype in which gradients are accumulated."""
    return torch.zeros(x.shape, dtype=accumulate_dtype(x), device=x.device)
