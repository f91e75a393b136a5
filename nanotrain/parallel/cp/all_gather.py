r"""Keys and values are gathered over cp and every rank attends with the queries it holds.

    forward     all-gather of keys and values (one call)             backward    reduce-scatter of their gradients

A rank's early chunk of queries sees the keys up to its own, the late one likewise; each is one call of attention over
just these keys, so no rank computes more than another:

    keys      0   1   2   3            rank 1 of 2 holds chunks 1 and 2
    early     x   \                    x seen   \ causal
    late      x   x   \

    B batch   S sequence   C chunk = S / (2 cp)   N query heads   G key/value heads   D, Dv widths of a head
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanotrain.comm.autograd import gather_along
from nanotrain.comm.group import Group
from nanotrain.parallel.cp.sdpa import attend
from nanotrain.parallel.cp.split import natural_order, zigzag_chunks


@dataclass(frozen=True)
class HalfMasks:
    """[B or 1, 1, C, keys up to the chunk's end] bool, for each chunk that a rank holds."""

    early: Tensor
    late: Tensor


class AllGatherAttention:
    """Attention with gathered keys and values."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.chunks = zigzag_chunks(group.index, group.size)

    def plan_mask(self, segment_ids: Tensor | None, *, tokens: Tensor) -> HalfMasks:
        """The rows of the whole mask that this rank's queries need."""
        size = tokens.shape[1] // 2
        return HalfMasks(*(_rows(segment_ids, chunk, size=size, like=tokens) for chunk in self._both()))

    def __call__(self, query: Tensor, *, key: Tensor, value: Tensor, mask: HalfMasks) -> Tensor:
        """Gather, then attend chunk by chunk."""
        both = torch.cat((key, value), dim=-1)
        gathered = natural_order(gather_along(both[None], self.group, dim=0))
        size = query.shape[1] // 2
        attended = []
        for rows, chunk, queries in zip((mask.early, mask.late), self._both(), query.chunk(2, dim=1), strict=True):
            keys, values = gathered[:, : (chunk + 1) * size].split((key.shape[-1], value.shape[-1]), dim=-1)
            attended.append(attend(queries, key=keys, value=values, mask=rows))
        return torch.cat(attended, dim=1)

    def _both(self) -> tuple[int, int]:
        return self.chunks.early, self.chunks.late


def _rows(segment_ids: Tensor | None, chunk: int, *, size: int, like: Tensor) -> Tensor:
    """[B or 1, 1, C, (chunk + 1) * C]: the mask of the queries in `chunk`."""
    start, stop = chunk * size, (chunk + 1) * size
    seen = torch.ones(size, stop, dtype=torch.bool, device=like.device).tril(start)[None, None]
    if segment_ids is None:
        return seen
    return seen & (segment_ids[:, None, start:stop, None] == segment_ids[:, None, None, :stop])
