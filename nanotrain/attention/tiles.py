r"""Tiles: rectangles of queries and keys without a mask, or with a small one.

A query attends to the keys from its first key, which a document or a window bounds, up to its own
position:

    documents     a chunk of queries inside a document     a window

    \             x x \                                    x x
    x\            x x x\                                   x x         masked tiles of at least
       \          before  its own keys                       x x       QUERIES_PER_MASK queries
       x\         it      (causal)                           x x

    Spans            the first key of every query
    chunk_segments   segments for attention within chunks of positions
    Tile             queries and keys of some samples
    TilePlan         the tiles of one call, and the positions of its queries and keys
    plan_tiles       spans -> tiles (pure)
    attend_tiles     attention in tiles, each a chunk (chunks.py), merged by their log-sum-exp
    forward_tiles    the result of a call, merged into the result of other calls
    tile_gradients   the gradients of each tile; backward_tiles: their sums

`attend_tiles` keeps queries, keys, values, output and log-sum-exp, and no mask.

    B batch   S sequence   N query heads   G key/value heads   Q queries   K keys   D, Dv head dims
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanotrain.attention.chunk_kernels import AttentionChunk, AttentionResult, ChunkGradients
from nanotrain.attention.chunks import (
    ScoreOptions,
    accumulate_dtype,
    add_sink,
    chunk_backward,
    chunk_forward,
    merge_log_sum_exp,
    sink_grad,
)
from nanotrain.comm.autograd import eager

# Runs of queries with the same first key that are shorter share a masked tile of about this many
# queries.
QUERIES_PER_MASK = 128

Inputs = tuple[Tensor, Tensor, Tensor]  # query [B, N, Q, D], key [B, G, K, D], value [B, G, K, Dv]


@dataclass(frozen=True)
class Spans:
    """Queries of full sequences attend to keys from their first key up to their own position."""

    # [B or 1, S] int64, ascending along S; one row where it is the same for all samples
    first_keys: np.ndarray
    starts: np.ndarray | None = None  # [B or 1, S] int64, of the segments; None for first_keys
    # earlier keys that a query attends to inside its segment; None if it is all of them
    window: int | None = None

    @classmethod
    def of(cls, segment_ids: Tensor | None, *, length: int, window: int | None = None) -> "Spans":
        """The spans of segments and a window.

        Args:
            segment_ids: [B, S] integers in host memory, equal within a segment; None if attention
                crosses segments.
            length: S.
            window: earlier keys that a query attends to; None for all of them.

        >>> Spans.of(torch.tensor([[0, 0, 0, 1, 1]]), length=5, window=1).first_keys.tolist()
        [[0, 0, 1, 3, 3]]
        """
        positions = np.arange(length)
        starts = np.zeros((1, length), dtype=np.int64)
        if segment_ids is not None:
            # raises for a tensor on a GPU, for which the host would have to wait
            ids = np.asarray(segment_ids)
            borders = np.where(ids[:, 1:] != ids[:, :-1], positions[1:], 0)
            padded = np.pad(borders, ((0, 0), (1, 0)))
            starts = np.maximum.accumulate(padded, axis=1)
        if window is None:
            return cls(starts, starts)
        first_keys = np.maximum(starts, positions - window)
        is_bounded = bool((first_keys > starts).any())
        return cls(first_keys, starts, window if is_bounded else None)


def first_of_chunks(positions: np.ndarray, starts: np.ndarray, *, size: int) -> np.ndarray:
    """The first position in the chunk of each position; chunks begin at the starts of segments."""
    return starts + (positions - starts) // size * size


def chunk_segments(segment_ids: Tensor | None, *, length: int, size: int) -> Tensor:
    """Segment ids [B or 1, S] with a segment for every chunk of `size` positions of a segment.

    >>> chunk_segments(torch.tensor([[7, 7, 7, 8, 8]]), length=5, size=2).tolist()
    [[0, 0, 2, 3, 3]]
    """
    starts = Spans.of(segment_ids, length=length).first_keys
    return torch.from_numpy(first_of_chunks(np.arange(length), starts, size=size))


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of a host array on a device, without a host sync."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


@dataclass(frozen=True)
class Tile:
    """Attention of some queries to some keys, by local indices."""

    samples: slice
    queries: slice
    keys: slice
    is_causal: bool = False  # query i attends to keys 0..i of the tile
    is_masked: bool = False  # whether a mask of the spans applies
    is_first: bool = True  # whether no earlier tile has these queries

    def select(self, result: AttentionResult) -> AttentionResult:
        """A view of the result of the tile's queries."""
        samples = AttentionResult(result.out[self.samples], result.lse[self.samples])
        return samples.queries(self.queries)


@dataclass(frozen=True)
class TilePlan:
    """The tiles of one call, and the positions of its queries and keys in their sequence."""

    tiles: tuple[Tile, ...]
    queries: Tensor  # [Q] int64
    keys: Tensor  # [K] int64
    first_keys: Tensor | None = None  # [B or 1, S] int64, where a tile is masked

    @cached_property
    def has_repeated_queries(self) -> bool:
        """Whether a query is in several tiles."""
        return not all(tile.is_first for tile in self.tiles)

    @property
    def is_one_tile(self) -> bool:
        """Whether one tile has all queries and keys."""
        if len(self.tiles) != 1:
            return False
        only = self.tiles[0]
        has_all_queries = only.queries == slice(0, len(self.queries))
        has_all_keys = only.keys == slice(0, len(self.keys))
        return only.is_first and has_all_queries and has_all_keys

    @property
    def mask_tensors(self) -> tuple[Tensor, ...]:
        """Mask tensors of this call, which autograd saves; none if masks follow from spans."""
        return ()

    def with_mask_tensors(self, tensors: Sequence[Tensor]) -> "TilePlan":
        """This plan with other `mask_tensors`, or with none."""
        return self

    def chunk(self, tile: Tile, inputs: Inputs, *, scores: ScoreOptions | None) -> AttentionChunk:
        """The attention of a tile.

        Args:
            tile: one of the tiles.
            inputs: query, key and value of the call.
            scores: options besides mask and scale.
        """
        query, key, value = inputs
        query = query[tile.samples, :, tile.queries]
        key = key[tile.samples, :, tile.keys]
        value = value[tile.samples, :, tile.keys]
        mask = self.mask(tile) if tile.is_masked else None
        scale = query.shape[-1] ** -0.5
        chunk = AttentionChunk(query, key, value, mask=mask, is_causal=tile.is_causal, scale=scale)
        if scores is None:
            return chunk
        queries = self.queries[tile.queries]
        keys = self.keys[tile.keys]
        return scores.apply_to(chunk, samples=tile.samples, queries=queries, keys=keys)

    def mask(self, tile: Tile | None = None) -> Tensor:
        """The mask of a tile, or of the first one.

        [samples or 1, 1, queries, keys] bool, True where a query attends to a key.
        """
        tile = tile or self.tiles[0]
        assert self.first_keys is not None, "masked tiles are planned with their spans"
        queries = self.queries[tile.queries]
        keys = self.keys[tile.keys]
        first_keys = self.first_keys[tile.samples][:, queries, None]
        is_causal = keys <= queries[:, None]
        is_in_span = keys >= first_keys
        return (is_causal & is_in_span)[:, None]


@dataclass(frozen=True)
class LocalChunk:
    """Consecutive positions of sequences, and the local index of the first."""

    positions: range
    offset: int = 0

    def local(self, start: int, stop: int) -> slice:
        """The local indices of positions [start, stop)."""
        shift = self.offset - self.positions.start
        return slice(start + shift, stop + shift)


def plan_tiles(
    spans: Spans, *, queries: LocalChunk, keys: LocalChunk, is_first: bool = True
) -> Iterator[Tile]:
    """The tiles of queries and keys.

    Args:
        spans: spans of full sequences.
        queries: their positions.
        keys: positions that all lie before the queries, or that include the queries.
        is_first: whether the queries have no tiles with other keys.
    """
    starts_before = keys.positions.start <= queries.positions.start
    includes = starts_before and keys.positions.stop >= queries.positions.stop
    assert includes or keys.positions.stop <= queries.positions.start, (
        "keys lie before the queries or include them"
    )
    is_shared = len(spans.first_keys) == 1  # all samples have the same spans
    for row, first_keys in enumerate(spans.first_keys):
        samples = slice(None) if is_shared else slice(row, row + 1)
        for group in _groups(first_keys, queries.positions):
            low = max(int(first_keys[group.start]), keys.positions.start)
            local_queries = queries.local(group.start, group.stop)
            if includes:
                earlier = keys.local(low, group.start)
                own_keys = keys.local(group.start, group.stop)
            else:
                earlier = keys.local(low, keys.positions.stop)
                own_keys = None
            tile = Tile(samples, local_queries, earlier, is_first=is_first)
            yield from _group_tiles(tile, own_keys, is_run=group.is_run)


def _group_tiles(tile: Tile, own_keys: slice | None, *, is_run: bool) -> Iterator[Tile]:
    """The tiles of a group of queries.

    Args:
        tile: tile of the keys before the group, which may be empty.
        own_keys: keys of the group itself, which follow; None where the keys lie before it.
        is_run: whether all queries of the group have the same first key.
    """
    has_earlier = tile.keys.start < tile.keys.stop
    if not is_run:
        stop = tile.keys.stop if own_keys is None else own_keys.stop
        if tile.keys.start < stop:
            yield replace(tile, keys=slice(tile.keys.start, stop), is_masked=True)
        return
    if has_earlier:
        yield tile
    if own_keys is not None:
        is_first = tile.is_first and not has_earlier
        yield replace(tile, keys=own_keys, is_causal=True, is_first=is_first)


@dataclass(frozen=True)
class _QueryGroup:
    """Consecutive queries [start, stop), which `_group_tiles` pairs with their keys."""

    start: int
    stop: int
    is_run: bool  # whether all queries have the same first key; False: they need a mask


def _groups(first_keys: np.ndarray, queries: range) -> Iterator[_QueryGroup]:
    """Split queries where their first key changes; groups below QUERIES_PER_MASK are joined."""
    local = first_keys[queries.start : queries.stop]
    borders = np.flatnonzero(local[1:] != local[:-1]) + 1
    bounds = [*borders.tolist(), len(local)]  # where runs end
    start = 0
    num_runs = 0
    for index, bound in enumerate(bounds):
        num_runs += 1
        is_last = index + 1 == len(bounds)
        is_next_short = not is_last and bounds[index + 1] - bound < QUERIES_PER_MASK
        if bound - start >= QUERIES_PER_MASK or not is_next_short:
            yield _QueryGroup(queries.start + start, queries.start + bound, num_runs == 1)
            start = bound
            num_runs = 0


def plan_chunks(
    spans: Spans,
    pairs: Iterable[tuple[LocalChunk, LocalChunk, bool]],
    *,
    queries: Tensor,
    keys: Tensor,
) -> TilePlan:
    """The plan of pairs of chunks.

    Args:
        spans: spans of full sequences.
        pairs: queries, keys, and whether the queries have no tiles before, in the order of
            computation.
        queries: [Q] int64, the positions of the queries, on the device.
        keys: [K] int64, the positions of the keys, on the device.
    """
    tiles: list[Tile] = []
    for query_chunk, key_chunk, is_first in pairs:
        tiles += plan_tiles(spans, queries=query_chunk, keys=key_chunk, is_first=is_first)
    first_keys: Tensor | None = None
    if any(tile.is_masked for tile in tiles):
        first_keys = on_device(spans.first_keys, queries.device)
    return TilePlan(tuple(tiles), queries, keys, first_keys)


def forward_tiles(
    plan: TilePlan,
    inputs: Inputs,
    *,
    scores: ScoreOptions | None,
    total: AttentionResult | None = None,
) -> AttentionResult:
    """Attention of the queries to all keys of the tiles, without a sink.

    Args:
        plan: tiles of the call.
        inputs: query [B, N, Q, D], key [B, G, K, D], value [B, G, K, Dv].
        scores: options besides mask and scale.
        total: the result of earlier calls in the accumulation dtype, into which this call is merged
            in place.
    """
    for tile in plan.tiles:
        chunk = plan.chunk(tile, inputs, scores=scores)
        if scores is not None and scores.observe is not None:
            scores.observe(chunk)
        part = chunk_forward(chunk)
        if total is None and plan.is_one_tile:
            return part
        if total is None:
            total = _empty_result(plan, inputs)
        if tile.is_first:
            tile.select(total).out.copy_(part.out)
            tile.select(total).lse.copy_(part.lse)
        else:
            merge_log_sum_exp(tile.select(total), part)
    assert total is not None, "every query attends to its own key"
    return total


def _empty_result(plan: TilePlan, inputs: Inputs) -> AttentionResult:
    """The result of all queries, not filled yet."""
    query, _, value = inputs
    batch, heads, queries, _ = query.shape
    dtype = accumulate_dtype(query) if plan.has_repeated_queries else query.dtype
    # [B, Q, N, Dv], as the next layer reads it
    out = query.new_empty((batch, queries, heads, value.shape[-1]), dtype=dtype)
    lse = query.new_empty(query.shape[:3], dtype=accumulate_dtype(query))
    return AttentionResult(out.transpose(1, 2), lse)


def tile_gradients(
    plan: TilePlan,
    inputs: Inputs,
    *,
    merged: AttentionResult,
    scores: ScoreOptions | None,
    grad: Tensor,
) -> Iterator[tuple[Tile, ChunkGradients]]:
    """The gradients that each tile contributes.

    Args:
        plan: tiles of the call.
        inputs: query, key and value of the forward.
        scores: options of the forward.
        merged: the result of the queries over all keys, with the sink.
        grad: [B, N, Q, Dv], the gradient of `merged.out`.
    """
    for tile in plan.tiles:
        chunk = plan.chunk(tile, inputs, scores=scores)
        tile_grad = grad[tile.samples, :, tile.queries]
        yield tile, chunk_backward(chunk, tile.select(merged), grad=tile_grad)


def backward_tiles(
    plan: TilePlan,
    inputs: Inputs,
    *,
    merged: AttentionResult,
    scores: ScoreOptions | None,
    grad: Tensor,
) -> ChunkGradients:
    """The gradients of query, key and value, with their shapes; arguments as `tile_gradients`."""
    gradients = tile_gradients(plan, inputs, merged=merged, scores=scores, grad=grad)
    if plan.is_one_tile:
        return next(gradients)[1]
    query, key, value = inputs
    query_dtype = accumulate_dtype(query) if plan.has_repeated_queries else query.dtype
    query_sum = torch.zeros_like(query, dtype=query_dtype)
    key_sum = torch.zeros_like(key, dtype=accumulate_dtype(key))
    value_sum = torch.zeros_like(value, dtype=accumulate_dtype(value))
    for tile, part in gradients:
        query_sum[tile.samples, :, tile.queries] += part.query
        key_sum[tile.samples, :, tile.keys] += part.key
        value_sum[tile.samples, :, tile.keys] += part.value
    return ChunkGradients(query_sum, key_sum, value_sum)


@eager  # torch's compiler cannot trace the backward of the operator
def attend_tiles(
    query: Tensor, *, key: Tensor, value: Tensor, plan: TilePlan, scores: ScoreOptions | None = None
) -> Tensor:
    """Softmax attention in tiles.

    Args:
        query: [B, Q, N, D].
        key: [B, K, G, D].
        value: [B, K, G, Dv].
        plan: tiles of the call.
        scores: options besides mask and scale.

    Returns:
        [B, Q, N, Dv].
    """
    inputs = [x.transpose(1, 2) for x in (query, key, value)]
    sink = None if scores is None else scores.sink
    out: Tensor = _AttendTiles.apply(*inputs, sink, plan, scores)
    return out.transpose(1, 2)


class _AttendTiles(torch.autograd.Function):
    """Attention in tiles, with a backward that computes the weights again.

    Queries [B, N, Q, D], keys [B, G, K, D], values [B, G, K, Dv], sinks [N] or None, plan and score
    options -> [B, N, Q, Dv].
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, *rest: Any
    ) -> Tensor:
        plan, scores = rest
        total = forward_tiles(plan, (query, key, value), scores=scores)
        if sink is not None:
            wide_out = total.out.to(accumulate_dtype(query))
            total = add_sink(replace(total, out=wide_out), sink)
        out = total.out.to(query.dtype)
        # an attribute of `ctx` stays in memory where the saved tensors are recomputed or offloaded
        ctx.plan = plan.with_mask_tensors(())
        ctx.scores = None if scores is None else replace(scores, sink=None)
        ctx.save_for_backward(query, key, value, sink, out, total.lse, *plan.mask_tensors)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sink, out, lse, *mask_tensors = ctx.saved_tensors
        plan = ctx.plan.with_mask_tensors(mask_tensors)
        grad = grads[0]
        merged = AttentionResult(out, lse)
        inputs = (query, key, value)
        gradients = backward_tiles(plan, inputs, merged=merged, scores=ctx.scores, grad=grad)
        query_grad = gradients.query.to(query.dtype)
        key_grad = gradients.key.to(key.dtype)
        value_grad = gradients.value.to(value.dtype)
        gradient_of_sink = sink_grad(sink, merged, grad=grad)
        return query_grad, key_grad, value_grad, gradient_of_sink, None, None
