r"""Tiles: rectangles of queries and keys that need no mask, or a small one, instead of one dense
mask.

A query attends to the keys from its first key, which a document or a window bounds, up to its own
position:

    documents          a chunk of queries inside a document          a window

    \                 x x \                                         x
    x\                x x x\                                        x x         masked tiles of at least
       \              before  causal, of                              x x       QUERIES_PER_MASK queries
       x\            it      its own keys                               x x

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

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanotrain.attention.chunks import (
    AttentionChunk,
    AttentionResult,
    ChunkGradients,
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
    """Queries of full sequences attend to the keys from their first key up to their own position."""

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
        positions, starts = np.arange(length), np.zeros((1, length), dtype=np.int64)
        if segment_ids is not None:
            # raises for a tensor on a GPU, which the host would have to wait for
            ids = np.asarray(segment_ids)
            borders = np.where(ids[:, 1:] != ids[:, :-1], positions[1:], 0)
            starts = np.maximum.accumulate(np.pad(borders, ((0, 0), (1, 0))), axis=1)
        first_keys = starts if window is None else np.maximum(starts, positions - window)
        return cls(first_keys, starts, window if (first_keys > starts).any() else None)


def first_of_chunks(positions: np.ndarray, starts: np.ndarray, *, size: int) -> np.ndarray:
    """The first positions of the chunks that positions are in, which begin with those of segments."""
    return starts + (positions - starts) // size * size


def chunk_segments(segment_ids: Tensor | None, *, length: int, size: int) -> Tensor:
    """Segment ids [B or 1, S] with a segment for every chunk of `size` positions, which begin with
    every segment.

    >>> chunk_segments(torch.tensor([[7, 7, 7, 8, 8]]), length=5, size=2).tolist()
    [[0, 0, 2, 3, 3]]
    """
    starts = Spans.of(segment_ids, length=length).first_keys
    return torch.from_numpy(first_of_chunks(np.arange(length), starts, size=size))


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of a host array on a device, without a host sync."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    return (
        host.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else host.to(device)
    )


@dataclass(frozen=True)
class Tile:
    """Attention of some queries to some keys, by local indices."""

    samples: slice
    queries: slice
    keys: slice
    is_causal: bool = False  # query i attends to keys 0..i of the tile
    is_masked: bool = False  # by the spans
    is_first: bool = True  # whether no earlier tile has these queries


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
        only = self.tiles[0]
        everything = (slice(0, len(self.queries)), slice(0, len(self.keys)))
        return len(self.tiles) == 1 and only.is_first and (only.queries, only.keys) == everything

    def chunk(self, tile: Tile, inputs: Inputs, *, scores: ScoreOptions | None) -> AttentionChunk:
        """The attention of a tile.

        Args:
            tile: one of the tiles.
            inputs: query, key and value of the call.
            scores: options beside mask and scale.
        """
        query, key, value = inputs
        query = query[tile.samples, :, tile.queries]
        key, value = (x[tile.samples, :, tile.keys] for x in (key, value))
        mask = self.mask(tile) if tile.is_masked else None
        chunk = AttentionChunk(
            query, key, value, mask, tile.is_causal, scale=query.shape[-1] ** -0.5
        )
        if scores is None:
            return chunk
        queries, keys = self.queries[tile.queries], self.keys[tile.keys]
        return scores.apply_to(chunk, samples=tile.samples, queries=queries, keys=keys)

    def mask(self, tile: Tile | None = None) -> Tensor:
        """[samples or 1, 1, queries, keys] bool, True where the queries of a tile attend to its
        keys; of the first.
        """
        tile = tile or self.tiles[0]
        assert self.first_keys is not None, "masked tiles are planned with their spans"
        queries, keys = self.queries[tile.queries], self.keys[tile.keys]
        first_keys = self.first_keys[tile.samples][:, queries, None]
        return ((keys <= queries[:, None]) & (keys >= first_keys))[:, None]


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
    includes = (
        keys.positions.start <= queries.positions.start
        and keys.positions.stop >= queries.positions.stop
    )
    assert includes or keys.positions.stop <= queries.positions.start, (
        "keys lie before the queries or include them"
    )
    for row, first_keys in enumerate(spans.first_keys):
        samples = slice(None) if len(spans.first_keys) == 1 else slice(row, row + 1)
        for start, stop, is_run in _groups(first_keys, queries.positions):
            low = max(int(first_keys[start]), keys.positions.start)
            before = start if includes else keys.positions.stop
            end = stop if includes else before
            tile = Tile(
                samples, queries.local(start, stop), keys.local(low, before), is_first=is_first
            )
            if not is_run:
                if low < end:
                    yield replace(tile, keys=keys.local(low, end), is_masked=True)
                continue
            if low < before:
                yield tile
                tile = replace(tile, is_first=False)
            if includes:
                yield replace(tile, keys=keys.local(start, stop), is_causal=True)


def _groups(first_keys: np.ndarray, queries: range) -> Iterator[tuple[int, int, bool]]:
    """Bounds of runs of queries with the same first key, or of several short ones, and whether it
    is one run.
    """
    local = first_keys[queries.start : queries.stop]
    bounds = [0, *(np.flatnonzero(local[1:] != local[:-1]) + 1).tolist(), len(local)]
    start, number = 0, 0
    for bound, after in zip(bounds[1:], [*bounds[2:], None], strict=True):
        number += 1
        is_followed = after is not None and after - bound < QUERIES_PER_MASK  # by a short run
        if bound - start >= QUERIES_PER_MASK or not is_followed:
            yield queries.start + start, queries.start + bound, number == 1
            start, number = bound, 0


def plan_chunks(
    spans: Spans,
    pairs: Iterable[tuple[LocalChunk, LocalChunk, bool]],
    *,
    queries: Tensor,
    keys: Tensor,
) -> TilePlan:
    """The plan of pairs of chunks: queries, keys, and whether the queries have no tiles before.

    Args:
        spans: spans of full sequences.
        pairs: pairs of chunks in the order of computation.
        queries: [Q] int64, the positions of the queries, on the device.
        keys: [K] int64, those of the keys.
    """
    tiles = tuple(
        tile
        for q, k, is_first in pairs
        for tile in plan_tiles(spans, queries=q, keys=k, is_first=is_first)
    )
    is_masked = any(tile.is_masked for tile in tiles)
    return TilePlan(
        tiles, queries, keys, on_device(spans.first_keys, queries.device) if is_masked else None
    )


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
        scores: options beside mask and scale.
        total: the result of earlier calls, into which this one is merged in place; in the
            accumulation dtype.
    """
    query, _, value = inputs
    for tile in plan.tiles:
        chunk = plan.chunk(tile, inputs, scores=scores)
        if scores is not None and scores.observe is not None:
            scores.observe(chunk)
        part = chunk_forward(chunk)
        if total is None and plan.is_one_tile:
            return part
        if total is None:
            dtype = accumulate_dtype(query) if plan.has_repeated_queries else query.dtype
            batch, heads, queries, _ = query.shape
            # as the next layer reads it
            out = query.new_empty((batch, queries, heads, value.shape[-1]), dtype=dtype)
            lse = query.new_empty(query.shape[:3], dtype=accumulate_dtype(query))
            total = AttentionResult(out.transpose(1, 2), lse)
        of_tile = AttentionResult(total.out[tile.samples], total.lse[tile.samples]).queries(
            tile.queries
        )
        if tile.is_first:
            of_tile.out.copy_(part.out)
            of_tile.lse.copy_(part.lse)
        else:
            merge_log_sum_exp(of_tile, part)
    assert total is not None, "every query attends to its own key"
    return total


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
        plan, inputs, scores: arguments of the forward.
        merged: the result of the queries over all keys, with the sink.
        grad: [B, N, Q, Dv], the gradient of `merged.out`.
    """
    for tile in plan.tiles:
        of_tile = AttentionResult(merged.out[tile.samples], merged.lse[tile.samples]).queries(
            tile.queries
        )
        chunk = plan.chunk(tile, inputs, scores=scores)
        yield tile, chunk_backward(chunk, of_tile, grad=grad[tile.samples, :, tile.queries])


def backward_tiles(
    plan: TilePlan,
    inputs: Inputs,
    *,
    merged: AttentionResult,
    scores: ScoreOptions | None,
    grad: Tensor,
) -> ChunkGradients:
    """The gradients of query [B, N, Q, D], key [B, G, K, D] and value [B, G, K, Dv]; arguments as
    `tile_gradients`.
    """
    gradients = tile_gradients(plan, inputs, merged=merged, scores=scores, grad=grad)
    if plan.is_one_tile:
        return next(gradients)[1]
    query = inputs[0]
    query_dtype = accumulate_dtype(query) if plan.has_repeated_queries else query.dtype
    key_sum, value_sum = (torch.zeros_like(x, dtype=accumulate_dtype(x)) for x in inputs[1:])
    sums = ChunkGradients(torch.zeros_like(query, dtype=query_dtype), key_sum, value_sum)
    for tile, part in gradients:
        sums.query[tile.samples, :, tile.queries] += part.query
        sums.key[tile.samples, :, tile.keys] += part.key
        sums.value[tile.samples, :, tile.keys] += part.value
    return sums


@eager  # an operator of its own, whose backward torch's compiler cannot trace
def attend_tiles(
    query: Tensor, *, key: Tensor, value: Tensor, plan: TilePlan, scores: ScoreOptions | None = None
) -> Tensor:
    """Softmax attention: query [B, Q, N, D], key [B, K, G, D], value [B, K, G, Dv] -> [B, Q, N,
    Dv].
    """
    inputs = [x.transpose(1, 2) for x in (query, key, value)]
    sink = None if scores is None else scores.sink
    out: Tensor = _AttendTiles.apply(*inputs, sink, plan, scores)
    return out.transpose(1, 2)


class _AttendTiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, *rest: Any
    ) -> Tensor:
        plan, scores = rest
        total = forward_tiles(plan, (query, key, value), scores=scores)
        if sink is not None:
            total = add_sink(replace(total, out=total.out.to(accumulate_dtype(query))), sink)
        out = total.out.to(query.dtype)
        ctx.plan, ctx.scores = plan, None if scores is None else replace(scores, sink=None)
        ctx.save_for_backward(query, key, value, sink, out, total.lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sink, out, lse = ctx.saved_tensors
        inputs, merged = (query, key, value), AttentionResult(out, lse)
        found = backward_tiles(ctx.plan, inputs, merged=merged, scores=ctx.scores, grad=grads[0])
        gradients = (
            found.query.to(query.dtype),
            found.key.to(key.dtype),
            found.value.to(value.dtype),
        )
        return *gradients, sink_grad(sink, merged, grad=grads[0]), None, None
