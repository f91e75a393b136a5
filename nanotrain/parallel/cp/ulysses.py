"""A rank trades its part of every head for the whole sequence of a part of the heads, and back after attention.

                heads 0 1 2 3                        heads 0 1 2 3
    chunks 0 3        a a a a           chunks 0 1 2 3     a a b b         rank a, rank b
    chunks 1 2        b b b b

    forward     one all-to-all of queries, keys and values, one of the outputs
    backward    the same two, the other way

Where there are fewer key/value heads than ranks, or a number that cp does not divide, they are repeated until cp does.

Jacobs et al., "DeepSpeed Ulysses"; here queries, keys and values travel together, and from a zigzag.

    B batch   L = S / cp positions here   N query heads   G key/value heads   D, Dv widths of a head
"""

import math

import torch
from torch import Tensor

from nanotrain.comm.all_to_all import all_to_all
from nanotrain.comm.group import Group
from nanotrain.parallel.cp.sdpa import SDPAttention
from nanotrain.parallel.cp.split import natural_order, zigzag_order


class UlyssesAttention:
    """Attention to whole sequences with a part of the heads."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.plain = SDPAttention()

    def plan_mask(self, segment_ids: Tensor | None, *, tokens: Tensor) -> Tensor | None:
        """That of whole sequences."""
        return self.plain.plan_mask(segment_ids, tokens=tokens)

    def __call__(self, query: Tensor, *, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Trade, attend, trade back."""
        size, groups = self.group.size, key.shape[2]
        assert query.shape[2] % size == 0, f"{query.shape[2]} query heads cannot be shared by {size} ranks"
        repeats = math.lcm(groups, size) // groups
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=2) for x in (key, value))
        query, key, value = self._heads_for_positions([query, key, value])
        return self._positions_for_heads(self.plain(query, key=key, value=value, mask=mask))

    def _heads_for_positions(self, tensors: list[Tensor]) -> list[Tensor]:
        """Each [B, L, n, d] -> [B, S, n / cp, d]."""
        size = self.group.size
        shapes = [(x.shape[2] // size, x.shape[3]) for x in tensors]
        by_owner = [x.unflatten(2, (size, -1)).flatten(3) for x in tensors]  # [B, L, cp, n / cp * d]
        leaving = torch.cat(by_owner, dim=-1).permute(2, 0, 1, 3)
        whole = natural_order(self._trade(leaving))
        pieces = whole.split([heads * width for heads, width in shapes], dim=-1)
        return [piece.unflatten(-1, shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def _positions_for_heads(self, out: Tensor) -> Tensor:
        """[B, S, N / cp, Dv] -> [B, L, N, Dv]."""
        arrived = self._trade(zigzag_order(out, size=self.group.size))
        return arrived.permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _trade(self, pieces: Tensor) -> Tensor:
        """[cp, ...], one piece for each rank -> [cp, ...], one from each rank."""
        one_each = [1] * self.group.size
        return all_to_all(pieces, self.group, input_splits=one_each, output_splits=one_each)
