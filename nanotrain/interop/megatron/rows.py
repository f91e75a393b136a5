"""Rows of a tensor of ours among those of a tensor of Megatron-LM.

Rows          rows that alternate with those of other tensors, group by group
RotaryPairs   rows of heads whose rotary channels are stored there pair by pair
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Run(NamedTuple):
    """Rows of ours that follow one another there, at equal distances."""

    start: int  # our first row
    stop: int  # our row after the last
    first: int  # the first row there
    step: int = 1  # distance there

    @property
    def last(self) -> int:
        """The row there behind the last one."""
        return self.first + (self.stop - self.start - 1) * self.step + 1


@dataclass(frozen=True)
class Rows:
    """The rows of a tensor of ours among those of theirs."""

    first: int  # the row there of our first one
    per_group: int  # rows of ours that follow one another there
    stride: int  # rows there from the beginning of a group to that of the next

    def runs(self, start: int, stop: int) -> Iterator[Run]:
        """Runs of our rows start <= row < stop.

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
    """Heads that end in rotary channels: a pair that rotates is side by side there.

    Ours have the first channels of all pairs, then the second ones. A head of two plain and four
    rotary channels:

        ours     p0 p1  a0 a1 b0 b1
        theirs   p0 p1  a0 b0 a1 b1
    """

    plain: int  # channels of a head without a position
    rotary: int  # channels of a head that are rotated

    def runs(self, start: int, stop: int) -> Iterator[Run]:
        """Runs of our rows start <= row < stop.

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
        """The rows of all heads in the order there, [rows, ...]."""
        heads = values.unflatten(0, (-1, self.plain + self.rotary))
        rotary = heads[:, self.plain :].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return torch.cat([heads[:, : self.plain], rotary], dim=1).flatten(0, 1)
