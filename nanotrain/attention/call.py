"""The protocols of attention, and attention calls, planned once per microbatch for all layers.

    CoreAttention     the attention of a layer: query, key and value of this rank's tokens
    AttentionKernel   a row of backends.py: a function of query, key, value and an AttentionCall
    AttentionCall     attention of some queries to keys of full sequences
    TileKernel        the kernel that computes every call, in tiles
    largest_logits    the largest logits of queries and keys

Kernels return no logits, so for QK-clip the scores are computed once more, a block of queries at a
time: one of the two matrix products of a forward, without gradients.

    B batch   S sequence   N query heads   G key/value heads   Q queries   K keys   D, Dv head dims
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from nanotrain.attention.chunk_kernels import AttentionChunk
from nanotrain.attention.chunks import ScoreOptions
from nanotrain.attention.tiles import (
    Inputs,
    LocalChunk,
    Spans,
    Tile,
    TilePlan,
    attend_tiles,
    on_device,
    plan_chunks,
)
from nanotrain.comm.autograd import eager

BLOCK_NUMEL = 2**24  # scores at once: 64 MiB in fp32


class CoreAttention(Protocol):
    """Causal softmax attention over sequences sharded across a cp group."""

    def plan_mask(
        self, segment_ids: Tensor | None, *, tokens: Tensor, window: int | None = None
    ) -> Any:
        """Prepare the attention mask, once per microbatch for all layers.

        Args:
            segment_ids: [B, S] integers of the full sequences in host memory, equal within a
                segment; None if attention crosses segments.
            tokens: [B, S / cp], the tokens of this rank.
            window: earlier keys that a query attends to; None for all of them.

        Returns:
            The `mask` argument of `__call__`, in a form private to the backend.
        """

    def __call__(
        self, query: Tensor, *, key: Tensor, value: Tensor, mask: Any, scores: ScoreOptions | None
    ) -> Tensor:
        """Attend.

        Args:
            query: [B, S / cp, N, D].
            key: [B, S / cp, G, D]; N is a multiple of G.
            value: [B, S / cp, G, Dv].
            mask: the result of `plan_mask` for this microbatch.
            scores: softcap, sink, dropout and an observer of the logits; None without any.

        Returns:
            [B, S / cp, N, Dv].
        """


class AttentionKernel(Protocol):
    """A function that computes a call."""

    def __call__(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        call: "AttentionCall",
        scores: ScoreOptions | None,
    ) -> Tensor:
        """query [B, Q, N, D], key [B, K, G, D], value [B, K, G, Dv] -> [B, Q, N, Dv]."""


@dataclass(frozen=True)
class AttentionCall:
    """Queries attend to the keys from their first key up to their own position."""

    kernel: AttentionKernel
    spans: Spans  # the first keys in full sequences
    queries: range  # positions of the queries
    device: torch.device

    @property
    def keys(self) -> range:
        """The positions of the keys, from 0 to the last query."""
        return range(self.queries.stop)

    @cached_property
    def is_causal(self) -> bool:
        """Whether every query attends to all keys up to its own."""
        first_keys = self.spans.first_keys[:, self.queries.start : self.queries.stop]
        return not first_keys.any()

    @cached_property
    def tiles(self) -> TilePlan:
        """The tiles of the call, in the order in which they are computed."""
        pair = (LocalChunk(self.queries), LocalChunk(self.keys), True)
        queries, keys = self._positions()
        return plan_chunks(self.spans, [pair], queries=queries, keys=keys)

    @cached_property
    def masked_tile(self) -> TilePlan:
        """The call as one tile with a mask."""
        queries, keys = self._positions()
        tile = Tile(slice(None), slice(0, len(queries)), slice(0, len(keys)), is_masked=True)
        return TilePlan((tile,), queries, keys, on_device(self.spans.first_keys, self.device))

    @cached_property
    def kernel_plans(self) -> dict[str, Any]:
        """Data that a kernel derives from this call once for all layers, by name of the kernel."""
        return {}

    def _positions(self) -> tuple[Tensor, Tensor]:
        """Positions of the queries and of the keys, on the device."""
        queries = torch.arange(self.queries.start, self.queries.stop, device=self.device)
        keys = torch.arange(self.queries.stop, device=self.device)
        return queries, keys

    @eager
    def __call__(
        self, query: Tensor, *, key: Tensor, value: Tensor, scores: ScoreOptions | None = None
    ) -> Tensor:
        """Attend: query [B, Q, N, D], key [B, K, G, D], value [B, K, G, Dv] -> [B, Q, N, Dv]."""
        if scores is not None and scores.observe is not None:
            inputs = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
            self._observe_logits(inputs, scores.observe)
            scores = None if scores.is_plain else replace(scores, observe=None)
        return self.kernel(query, key=key, value=value, call=self, scores=scores)

    @torch.no_grad()
    def _observe_logits(self, inputs: Inputs, observe: Callable[..., None]) -> None:
        """Call the observer with every tile of query, key and value."""
        for tile in self.tiles.tiles:
            observe(self.tiles.chunk(tile, inputs, scores=None))


class TileKernel:
    """Attention in tiles of queries and keys, most of them without a mask (tiles.py)."""

    def __call__(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        call: AttentionCall,
        scores: ScoreOptions | None,
    ) -> Tensor:
        """Attend tile by tile."""
        return attend_tiles(query, key=key, value=value, plan=call.tiles, scores=scores)


@torch.no_grad()
def largest_logits(chunk: AttentionChunk, *, block_numel: int = BLOCK_NUMEL) -> Tensor:
    """The largest scaled and unmasked score of each head: [N] fp32, minus infinity without any.

    The products have the dtype of the queries: in bf16 a logit is exact to 2^-9.
    """
    batch, num_heads, num_queries, _ = chunk.query.shape
    num_groups, num_keys = chunk.key.shape[1:3]
    grouped = chunk.query.unflatten(1, (num_groups, -1))  # [B, G, N / G, Q, D]
    largest = grouped.new_full((num_heads,), -torch.inf, dtype=torch.float32)
    length = max(1, block_numel // (batch * num_heads * num_keys))
    for start in range(0, num_queries, length):
        stop = min(start + length, num_queries)
        keys = chunk.key
        if chunk.is_causal:
            keys = keys[:, :, :stop]
        queries = grouped[:, :, :, start:stop].flatten(2, 3)
        scores = queries @ keys.mT
        scores = scores.unflatten(2, (-1, stop - start))  # [B, G, N / G, queries, K]
        mask = _mask_of_queries(chunk, start=start, stop=stop)
        if mask is not None:
            scores.masked_fill_(~mask, -torch.inf)
        block_largest = scores.amax((0, 3, 4)).flatten()
        block_largest = block_largest.float() * chunk.scale
        torch.maximum(largest, block_largest, out=largest)
    return largest


def _mask_of_queries(chunk: AttentionChunk, *, start: int, stop: int) -> Tensor | None:
    """The mask of queries [start, stop), True where they may attend.

    It broadcasts to [B, G, N / G, stop - start, K].
    """
    if chunk.is_causal:
        positions = torch.arange(stop, device=chunk.query.device)
        return positions[start:, None] >= positions
    return None if chunk.mask is None else chunk.mask[:, :, None, start:stop]
