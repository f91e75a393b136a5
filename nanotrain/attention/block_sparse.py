"""Attention with grouped key/value heads to selected blocks of keys (blocks.py).

attend_blocks    attention of the queries of a call
BlockTiles       the selected blocks of each query and group of heads, as masked tiles

B batch   Q queries   S keys   N heads   G key/value heads   D, Dv head dims   M blocks
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nanotrain.attention.block_gathered import ChosenBlocks, attend_gathered_blocks
from nanotrain.attention.blocks import BlockIndex, BlockSelection
from nanotrain.attention.call import AttentionCall
from nanotrain.attention.chunks import ScoreOptions
from nanotrain.attention.selection import AttachGradients
from nanotrain.attention.tiles import Tile, TilePlan, attend_tiles


@dataclass(frozen=True)
class BlockTiles(TilePlan):
    """Consecutive queries, each a tile with its selected blocks."""

    numbers: Tensor | None = None  # [B or 1, S] int64, the block of each key
    # by the first query of a tile: [B, G, queries, M] bool
    selected: dict[int, Tensor] = field(default_factory=dict)

    @property
    def is_one_tile(self) -> bool:
        """Always False: the path for a single tile would leave padding in the output."""
        return False

    @property
    def mask_tensors(self) -> tuple[Tensor, ...]:
        """The selected blocks of each tile."""
        return tuple(self.selected.values())

    def with_mask_tensors(self, tensors: Sequence[Tensor]) -> "BlockTiles":
        """This plan with other selected blocks, one tensor per tile, or none."""
        starts = [tile.queries.start for tile in self.tiles]
        return replace(self, selected=dict(zip(starts, tensors, strict=False)))

    def mask(self, tile: Tile | None = None) -> Tensor:
        """[B, G, queries, keys] bool, True where a query attends to a key."""
        tile = tile or self.tiles[0]
        may_attend = super().mask(tile)
        selected = self.selected[tile.queries.start]
        assert self.numbers is not None, "blocks are planned with their numbers"
        numbers = self.numbers[:, tile.keys]
        numbers = numbers[:, None, None]
        num_keys = numbers.shape[-1]
        numbers = numbers.expand(*selected.shape[:3], num_keys)
        is_selected = selected.gather(-1, numbers)
        return is_selected & may_attend


def attend_blocks(
    query: Tensor,
    *,
    key: Tensor,
    value: Tensor,
    call: AttentionCall,
    index: BlockIndex,
    scores: ScoreOptions | None,
) -> Tensor:
    """Softmax attention to the selected blocks, with the gradients of the loss of the index.

    Args:
        query: [B, Q, N, D], N heads of this rank.
        key: [B, S, G, D].
        value: [B, S, G, Dv].
        call: the queries, and the keys that they may attend to.
        index: index of these queries and keys, with a query per key/value head.
        scores: options besides mask and scale; None for none.

    Returns:
        [B, Q, N, Dv].
    """
    softcap = None if scores is None else scores.softcap
    selection = BlockSelection(index, call, softcap=softcap)
    selection.run(query.detach(), key.detach())
    if index.gathers and not selection.selects_all:
        chosen = ChosenBlocks.of(selection, query.shape[1])
        out = attend_gathered_blocks(query, key=key, value=value, chosen=chosen, scores=scores)
    else:
        plan = _masked_tiles(selection)
        out = attend_tiles(query, key=key, value=value, plan=plan, scores=scores)
    if torch.is_grad_enabled():
        gradients = selection.gradients()
        out = AttachGradients.apply(out, *index.tensors, *gradients)
    return out


def _masked_tiles(selection: BlockSelection) -> TilePlan:
    """The selected blocks as tiles; the tiles of the call where all blocks are selected."""
    call = selection.call
    if selection.selects_all:
        return call.tiles
    tiles = []
    for start, selected in selection.selected.items():
        stop = start + selected.shape[2]
        rows = slice(start, stop)
        keys = slice(0, call.queries.start + stop)
        tile = Tile(slice(None), rows, keys, is_masked=True)
        tiles.append(tile)
    whole = call.masked_tile
    return BlockTiles(
        tuple(tiles),
        whole.queries,
        whole.keys,
        whole.first_keys,
        numbers=selection.blocks.numbers,
        selected=selection.selected,
    )
