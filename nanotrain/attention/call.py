"""`AttentionCall`: attention of queries to keys of full sequences, planned once per microbatch for all layers.

Kernels are functions of query, key and value; they read masks and positions from the call.

    B batch   S sequence   N query heads   G key/value heads   Q queries   K keys   D, Dv head dims
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from nanotrain.attention.max_logits import LogitObserver
from nanotrain.attention.scores import ScoreOptions
from nanotrain.attention.tile_attention import attend_tiles
from nanotrain.attention.tiles import LocalChunk, Spans, Tile, TilePlan, plan_chunks
from nanotrain.comm.autograd import eager


class AttentionKernel(Protocol):
    """A function that computes a call."""

    takes_scores: bool  # whether it computes softcap, sink and dropout

    def __call__(
        self, query: Tensor, *, key: Tensor, value: Tensor, call: "AttentionCall", scores: ScoreOptions | None
    ) -> Tensor:
        """query [B, Q, N, D], key [B, K, G, D], value [B, K, G, Dv] -> [B, Q, N, Dv]."""
        ...


@dataclass(frozen=True)
class AttentionCall:
    """Queries attend to the keys from their first key up to their own position."""

    kernel: AttentionKernel
    spans: Spans  # of full sequences
    queries: range  # their positions
    keys: range  # from 0 to the last query
    device: torch.device

    @cached_property
    def is_causal(self) -> bool:
        """Whether every query attends to all keys up to its own."""
        return not self.spans.first_keys[:, self.queries.start : self.queries.stop].any()

    @cached_property
    def tiles(self) -> TilePlan:
        """The call as tiles."""
        pair = (LocalChunk(self.queries), LocalChunk(self.keys), True)
        queries, keys = self._positions()
        return plan_chunks(self.spans, [pair], queries=queries, keys=keys)

    @cached_property
    def masked_tile(self) -> TilePlan:
        """The call as one tile with a mask."""
        queries, keys = self._positions()
        tile = Tile(slice(None), slice(0, len(queries)), slice(0, len(keys)), is_masked=True)
        return TilePlan((tile,), queries, keys, self.spans.on(self.device))

    @cached_property
    def kernel_plans(self) -> dict[str, Any]:
        """Data that kernels derive from this call once and use for all layers, by a key per kernel."""
        return {}

    def _positions(self) -> tuple[Tensor, Tensor]:
        queries, keys = (torch.arange(x.start, x.stop, device=self.device) for x in (self.queries, self.keys))
        return queries, keys

    @eager
    def __call__(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        observe: LogitObserver | None = None,
        scores: ScoreOptions | None = None,
    ) -> Tensor:
        """Attend: query [B, Q, N, D], key [B, K, G, D], value [B, K, G, Dv] -> [B, Q, N, Dv].

        Args:
            query, key, value: of the call.
            observe: called with every tile.
            scores: softcap, sink and dropout.
        """
        if observe is not None:
            with torch.no_grad():
                inputs = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
                for tile in self.tiles.tiles:
                    observe(self.tiles.chunk(tile, inputs, scores=None))
        kernel = self.kernel if scores is None or self.kernel.takes_scores else TileKernel()
        return kernel(query, key=key, value=value, call=self, scores=scores)


class TileKernel:
    """Tiles without masks or with small ones (tiles.py)."""

    takes_scores = True

    def __call__(
        self, query: Tensor, *, key: Tensor, value: Tensor, call: AttentionCall, scores: ScoreOptions | None
    ) -> Tensor:
        """Attend tile by tile."""
        return attend_tiles(query, key=key, value=value, plan=call.tiles, scores=scores)
