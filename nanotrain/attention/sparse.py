"""Attention to selected keys (selection.py) with the scores of all keys, the others masked.

    attend_selected    attention of the queries of a call
    SelectedTiles      the selected keys of each query, a bit per key, as masked tiles
    MaskedSelection    the selection, and the loss of the index; for compressed keys too

Queries are computed a block at a time, so there is no tensor of all heads, queries and keys. Where
no query has more keys than it may select, nothing is masked. Longer sequences of latent attention
gather the selected keys instead (gathered.py).

    B batch   Q queries   S keys   N heads   D head dim
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from nanotrain.attention.call import AttentionCall
from nanotrain.attention.chunks import ScoreOptions
from nanotrain.attention.gathered import SelectedKeys, cap_scores_, wide_product
from nanotrain.attention.selection import (
    AnyIndex,
    AttachGradients,
    IndexGradients,
    IndexKeys,
)
from nanotrain.attention.tiles import Tile, TilePlan, attend_tiles
from nanotrain.comm.collectives import all_reduce
from nanotrain.comm.group import Group

BITS = 8  # bits of a byte


@dataclass(frozen=True)
class SelectedTiles(TilePlan):
    """Blocks of queries, each a tile with its mask of selected keys."""

    # by the first query of a tile: [B, queries, keys / 8] uint8
    bits: dict[int, Tensor] = field(default_factory=dict)

    @property
    def is_one_tile(self) -> bool:
        """Always False: the path for a single tile would leave padding in the output."""
        return False

    @property
    def mask_tensors(self) -> tuple[Tensor, ...]:
        """The selected keys of each tile."""
        return tuple(self.bits.values())

    def with_mask_tensors(self, tensors: Sequence[Tensor]) -> "SelectedTiles":
        """This plan with other selected keys, one tensor per tile, or none."""
        starts = [tile.queries.start for tile in self.tiles]
        return replace(self, bits=dict(zip(starts, tensors, strict=False)))

    def mask(self, tile: Tile | None = None) -> Tensor:
        """[B, 1, queries, keys] bool, True where a key is selected."""
        tile = tile or self.tiles[0]
        bits = self.bits[tile.queries.start]
        return unpack_bits(bits, number=tile.keys.stop)[:, None]


def attend_selected(
    query: Tensor,
    *,
    key: Tensor,
    value: Tensor,
    call: AttentionCall,
    index: AnyIndex,
    scores: ScoreOptions | None,
) -> Tensor:
    """Softmax attention to the selected keys, with the gradients of the loss of the index.

    Args:
        query: [B, Q, N, D], N heads of this rank.
        key: [B, S, N, D].
        value: [B, S, N, Dv].
        call: the queries, and the keys that they may attend to.
        index: index of these queries and keys.
        scores: options besides mask and scale; None for none.

    Returns:
        [B, Q, N, Dv].
    """
    selection = MaskedSelection.of(index, scores)
    plan = _select_keys(selection, call, query=query.detach(), key=key.detach())
    gradients = selection.gradients()
    out = attend_tiles(query, key=key, value=value, plan=plan, scores=scores)
    if torch.is_grad_enabled() and gradients:
        out = AttachGradients.apply(out, *index.tensors, *gradients)
    return out


@torch.no_grad()
def _select_keys(
    selection: "MaskedSelection", call: AttentionCall, *, query: Tensor, key: Tensor
) -> TilePlan:
    """The tiles of the selected keys of a call; query and key as of `attend_selected`."""
    index = selection.index
    selects_all = index.topk >= len(call.keys)
    batch, num_queries, num_heads, _ = query.shape
    if selects_all and index.loss is None:
        index.keep(query.new_full((batch, num_queries, 1), -1, dtype=torch.int32))
        return call.tiles
    tiles = []
    num_kept = 0 if index.kept is None else index.topk
    positions = query.new_full((batch, num_queries, num_kept), -1, dtype=torch.int32)
    for rows in index.blocks(call, num_heads=num_heads, size=num_queries):
        num_keys = call.queries.start + rows.stop
        tile = Tile(slice(None), rows, slice(0, num_keys), is_masked=True)
        may_attend = call.masked_tile.mask(tile)[:, 0]
        selected = selection.add(rows, may_attend, query=query, key=key)
        tiles.append(tile)
        if index.kept is not None:
            found = SelectedKeys.of(selected, topk=index.topk, first_query=0).positions
            positions[:, rows, : found.shape[-1]] = found
    index.keep(positions)
    if selects_all:
        return call.tiles
    allowed = call.masked_tile
    return SelectedTiles(tuple(tiles), allowed.queries, allowed.keys, bits=selection.bits)


@dataclass(frozen=True)
class MaskedSelection:
    """The selected keys of queries and the loss of the index; `add` adds some queries at a time."""

    index: AnyIndex
    softcap: float | None  # of the scores of attention
    sums: IndexGradients | None  # None where an earlier layer selected
    bits: dict[int, Tensor]  # by the first query that was added with them: [B, queries, keys / 8]

    @classmethod
    def of(cls, index: AnyIndex, scores: ScoreOptions | None) -> "MaskedSelection":
        """A selection without queries; scores as of `attend_selected`."""
        softcap = None if scores is None else scores.softcap
        return cls(index, softcap, index.gradients(), bits={})

    @torch.no_grad()
    def add(self, rows: slice, may_attend: Tensor, *, query: Tensor, key: Tensor) -> Tensor:
        """Select the keys of some queries, and add their loss.

        Args:
            rows: the queries.
            may_attend: [B or 1, rows, keys] bool, whether a query may attend to each of the first
                keys.
            query: [B, Q, N, D], all queries.
            key: [B, S, N, D], or [B, S, 1, D] of all heads.

        Returns:
            [B, rows, keys] bool.
        """
        selected, scores = self.index.select(rows, may_attend)
        self.bits[rows.start] = pack_bits(selected)
        loss = self.index.loss
        if loss is None:
            return selected
        assert self.sums is not None and scores is not None, "an index with a loss has scores"
        num_keys = may_attend.shape[-1]
        mask = selected if loss.is_sparse else may_attend
        target = mean_probabilities(
            query[:, rows], key[:, :num_keys], mask=mask, softcap=self.softcap, tp=loss.tp
        )
        index_keys = IndexKeys(self.index.key[:, :num_keys])
        self.sums.add(rows, scores=scores, mask=mask, target=target, keys=index_keys)
        return selected

    def gradients(self) -> list[Tensor]:
        """The gradients by the tensors of the index; none where an earlier layer selected."""
        return [] if self.sums is None else self.sums.finish()


def mean_probabilities(
    query: Tensor, key: Tensor, *, mask: Tensor, softcap: float | None, tp: Group
) -> Tensor:
    """The mean of the attention probabilities of all heads; 0 for a query without keys.

    Args:
        query: [B, Q, N, D], N heads of this rank.
        key: [B, S, N, D], or [B, S, 1, D] of all heads.
        mask: [B or 1, Q, S] bool, True for the keys of each query.
        softcap: bound of the scores; None for none.
        tp: ranks with other heads.

    Returns:
        [B, Q, S].
    """
    batch, _, num_heads, head_dim = query.shape
    groups = key.shape[2]
    flat_query = rearrange(query, "b q (g n) d -> (b g) (n q) d", g=groups)
    flat_key = rearrange(key, "b s g d -> (b g) d s")
    products = wide_product(flat_query, flat_key).mul_(head_dim**-0.5)
    scores = products.view(batch, num_heads, *mask.shape[1:])
    cap_scores_(scores, softcap)
    scores.masked_fill_(~mask[:, None], -torch.inf)
    summed = scores.softmax(-1).sum(1)
    summed.masked_fill_(~mask, 0.0)  # NaN where a query has no key
    all_reduce(summed, tp)
    return summed.div_(num_heads * tp.size)


def pack_bits(mask: Tensor) -> Tensor:
    """[..., S] bool -> [..., S / 8] uint8, the first in the lowest bit; zeros after the last."""
    padded = F.pad(mask, (0, -mask.shape[-1] % BITS))
    bits = padded.unflatten(-1, (-1, BITS)).to(torch.uint8)
    shifts = torch.arange(BITS, dtype=torch.uint8, device=mask.device)
    return (bits << shifts).sum(-1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, *, number: int) -> Tensor:
    """Inverse of `pack_bits`: [..., S / 8] uint8 -> the first [..., number] bool."""
    unpacked = (bits[..., None] >> torch.arange(BITS, device=bits.device)) & 1
    return unpacked.flatten(-2)[..., :number].bool()
