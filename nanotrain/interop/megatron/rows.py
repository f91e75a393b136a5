"""Where the rows of a tensor of nanotrain are in a tensor of Megatron-LM.

Rows          rows that alternate with rows of other tensors, group by group
RotaryPairs   rows of heads whose rotary channels Megatron-LM stores pair by pair
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Run(NamedTuple):
    """Consecutive rows of nanotrain whose rows in Megatron-LM have equal distances."""

    start: int  # first row in nanotrain
    stop: int  # row after the last one in nanotrain
    first: int  # first row in Megatron-LM
    step: int = 1  # distance in Megatron-LM

    @property
    def last(self) -> int:
        """The row after the last one in Megatron-LM."""
        return self.first + (self.stop - self.start - 1) * self.step + 1


@dataclass(frozen=True)
class Rows:
    """The rows of a nanotrain tensor that several groups of a Megatron-LM tensor have parts of."""

    first: int  # row in Megatron-LM of the tensor's first row
    per_group: int  # rows of the tensor in a group, one after another
    stride: int  # rows of a group in Megatron-LM, of all its nanotrain tensors

    def runs(self, start: int, stop: int) -> Iterator[Run]:
        """Runs of the rows start <= row < stop of nanotrain.

        >>> [tuple(run) for run in Rows(first=4, per_group=2, stride=6).runs(1, 4)]
        [(1, 2, 5, 1), (2, 4, 10, 1)]
        """
        while start < stop:
            group, within = divmod(start, self.per_group)
            end = min(stop, (group + 1) * self.per_group)
            yield Run(start, end, self.first + group * self.stride + within)
            start = end


@dataclass(frozen=True)
class RotaryPairs:
    """Heads that end in rotary channels; in Megatron-LM the channels of a pair are neighbours.

    Nanotrain has the first channels of all pairs, then the second ones. A head of two plain and
    four rotary channels:

        nanotrain     p0 p1  a0 a1 b0 b1
        Megatron-LM   p0 p1  a0 b0 a1 b1
    """

    plain: int  # channels of a head without a position
    rotary: int  # channels of a head that are rotated

    def runs(self, start: int, stop: int) -> Iterator[Run]:
        """Runs of the rows start <= row < stop of nanotrain.

        >>> [tuple(run) for run in RotaryPairs(plain=2, rotary=4).runs(1, 6)]
        [(1, 2, 1, 1), (2, 4, 2, 2), (4, 6, 3, 2)]
        """
        half = self.rotary // 2
        head_rows = self.plain + self.rotary
        while start < stop:
            head, channel = divmod(start, head_rows)
            begin = head * head_rows
            if channel < self.plain:
                end = begin + self.plain
                first = start
                step = 1
            else:
                second, pair = divmod(channel - self.plain, half)
                end = begin + self.plain + (second + 1) * half
                first = begin + self.plain + 2 * pair + second
                step = 2
            end = min(stop, end)
            yield Run(start, end, first, step)
            start = end

    def to_pairs(self, values: Tensor) -> Tensor:
        """The rows of all heads in the order of Megatron-LM, [rows, ...]."""
        heads = values.unflatten(0, (-1, self.plain + self.rotary))
        rotary = heads[:, self.plain :].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return torch.cat([heads[:, : self.plain], rotary], dim=1).flatten(0, 1)
