"""Attention to selected keys (selection.py) with the scores of all keys, the others masked.

    attend_selected    attention of the queries of a call
    SelectedTiles      the selected keys of each query, a bit per key, as masked tiles

Queries are computed a block at a time, so there is no tensor of all heads, queries and keys. Where
no query has more keys than it may select, nothing is masked. Longer sequences of latent attention
gather the selected keys instead (gathered.py).

    B batch   Q queries   S keys   N heads   D head dim
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.attention.call import AttentionCall
from nanotrain.attention.chunks import ScoreOptions
from nanotrain.attention.gathered import SelectedKeys, cap_scores_, wide_product
from nanotrain.attention.selection import (
    AnyIndex,
    AttachGradients,
    IndexerLoss,
    IndexGradients,
    IndexKeys,
)
from nanotrain.attention.tiles import Tile, TilePlan, attend_tiles
from nanotrain.comm.collectives import all_reduce

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
    softcap = None if scores is None else scores.softcap
    selected = _Selection(index, call, softcap)
    plan, gradients = selected.run(query=query.detach(), key=key.detach())
    out = attend_tiles(query, key=key, value=value, plan=plan, scores=scores)
    if torch.is_grad_enabled() and gradients:
        out = AttachGradients.apply(out, *index.tensors, *gradients)
    return out


@dataclass(frozen=True)
class _Selection:
    """The selection of a call, and the loss of the index."""

    index: AnyIndex
    call: AttentionCall
    softcap: float | None  # of the scores of attention

    @torch.no_grad()
    def run(self, *, query: Tensor, key: Tensor) -> tuple[TilePlan, list[Tensor]]:
        """The tiles of the selected keys, and the gradients by the tensors of the index."""
        index = self.index
        call = self.call
        gradients = index.gradients()
        selects_all = index.topk >= len(call.keys)
        batch, num_queries, num_heads, _ = query.shape
        if selects_all and index.loss is None:
            index.keep(query.new_full((batch, num_queries, 1), -1, dtype=torch.int32))
            return call.tiles, _finish(gradients)
        tiles = []
        bits = {}
        num_kept = 0 if index.kept is None else index.topk
        positions = query.new_full((batch, num_queries, num_kept), -1, dtype=torch.int32)
        for rows in index.blocks(call, num_heads=num_heads, size=num_queries):
            num_keys = call.queries.start + rows.stop
            tile = Tile(slice(None), rows, slice(0, num_keys), is_masked=True)
            may_attend = call.masked_tile.mask(tile)[:, 0]
            selected, scores = index.select(rows, may_attend)
            tiles.append(tile)
            bits[rows.start] = pack_bits(selected)
            if index.kept is not None:
                found = SelectedKeys.of(selected, topk=index.topk, first_query=0).positions
                positions[:, rows, : found.shape[-1]] = found
            if index.loss is not None:
                loss_mask = selected if index.loss.is_sparse else may_attend
                keys = key[:, :num_keys]
                target = self._target(query[:, rows], keys, mask=loss_mask, loss=index.loss)
                assert gradients is not None and scores is not None, "an index has scores"
                index_keys = IndexKeys(index.key[:, :num_keys])
                gradients.add(rows, scores=scores, mask=loss_mask, target=target, keys=index_keys)
        index.keep(positions)
        plan: TilePlan = call.tiles
        if not selects_all:
            allowed = call.masked_tile
            plan = SelectedTiles(tuple(tiles), allowed.queries, allowed.keys, bits=bits)
        return plan, _finish(gradients)

    def _target(self, query: Tensor, key: Tensor, *, mask: Tensor, loss: IndexerLoss) -> Tensor:
        """The mean attention probabilities of all heads.

        query [B, Q, N, D], key [B, S, N, D], mask [B or 1, Q, S] -> [B, Q, S].
        """
        batch, _, num_heads, head_dim = query.shape
        flat_query = query.transpose(1, 2).flatten(0, 1)
        flat_key = key.transpose(1, 2).flatten(0, 1)
        products = wide_product(flat_query, flat_key.mT).mul_(head_dim**-0.5)
        scores = products.unflatten(0, (batch, num_heads))
        cap_scores_(scores, self.softcap)
        scores.masked_fill_(~mask[:, None], -torch.inf)
        summed = scores.softmax(-1).sum(1)
        all_reduce(summed, loss.tp)
        return summed.div_(num_heads * loss.tp.size)


def _finish(gradients: IndexGradients | None) -> list[Tensor]:
    """The gradients by the tensors of an index; none where an earlier layer selected."""
    return [] if gradients is None else gradients.finish()


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
