"""`Axes`: the axes of a topology, factored so that dense and expert groups are sets of the same.

A rank is a number whose digits are its coordinates. Tensor-parallel ranks and expert-parallel ranks
split the digits differently:

    8 ranks     dense    tp 2 | dp 4           digits of sizes 2 | 2 2
                expert   ep 4     | expert_dp 2              2 2 | 2

Cut at the borders of both, every group of the run is a set of digits, a bit mask here.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Self

from nanotrain.errors import ConfigError
from nanotrain.topology.groups import GROUP_NAMES, Ranks
from nanotrain.topology.topology import Topology

# names of the axes in messages, the most specific first
_NAMES = ("tp", "cp", "dp", "pp", "ep", "etp", "expert_dp", "dp_cp", "tp_cp")


class Untypable(ConfigError):
    """A layout that trains, but has no types: nothing is proved of it, nor found."""


class Digit(NamedTuple):
    """Ranks that differ in one digit only."""

    stride: int  # difference in rank between neighbours
    size: int  # ranks


@dataclass(frozen=True)
class Axes:
    """The digits of the ranks of a world, the fastest-varying first.

    >>> from nanotrain.config.parallel import ParallelConfig
    >>> parallel = ParallelConfig(tensor_model_parallel_size=2, expert_model_parallel_size=4,
    ...     expert_tensor_parallel_size=1)
    >>> axes = Axes.of(Topology.of(parallel, 8))
    >>> axes.digits
    (Digit(stride=1, size=2), Digit(stride=2, size=2), Digit(stride=4, size=2))
    >>> [bin(axes.masks[name]) for name in ("tp", "dp", "ep", "expert_dp")]
    ['0b1', '0b110', '0b11', '0b100']
    >>> axes.describe(0b110)
    'dp'
    """

    digits: tuple[Digit, ...]
    masks: dict[str, int]  # digits of the groups by name; 0 for a group of one rank
    end_ranks: Ranks = ()  # a rank of the first stage and one of the last, with tied embeddings
    _masks_of_ranks: dict[int, tuple[Ranks, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, topology: Topology, *, rank: int = 0) -> Self:
        """The axes of a topology; `ends` are the first and the last stage of one rank.

        Raises:
            Untypable: the borders of two groups do not nest, so that no axes have both.
        """
        members = {name: topology.members(0, name) for name in GROUP_NAMES}
        # the first and the last stage are no product of axes
        del members["embed"]
        borders = {1, topology.world_size}
        for ranks in members.values():
            for digit in _digits(ranks):
                borders |= {digit.stride, digit.stride * digit.size}
        ordered = sorted(borders)
        for low, high in pairwise(ordered):
            if high % low:
                raise Untypable(
                    "the groups of this layout cannot be typed",
                    why=f"they begin at multiples of {low} and of {high} ranks, which do not nest",
                    fix="choose sizes of which one divides the other, as powers of two",
                )
        digits = tuple(Digit(low, high // low) for low, high in pairwise(ordered))
        stages = topology.members(rank, "pp")
        axes = cls(digits, {}, tuple(stages[index] for index in topology.end_ranks))
        for name, ranks in members.items():
            axes.masks[name] = axes.mask(ranks)
        return axes

    @property
    def ends(self) -> int:
        """The first and the last stage, which are no digit."""
        return 1 << len(self.digits)

    @property
    def world(self) -> int:
        """The mask of all axes."""
        return (1 << len(self.digits)) - 1

    def mask(self, ranks: Ranks) -> int:
        """The digits in which the ranks of a group differ."""
        known = self._masks_of_ranks.get(id(ranks))
        if known is not None:
            return known[1]
        mask = 0
        for wide in _digits(ranks):
            for bit, digit in enumerate(self.digits):
                if wide.stride <= digit.stride < wide.stride * wide.size:
                    mask |= 1 << bit
        self._masks_of_ranks[id(ranks)] = (ranks, mask)  # keeps the ranks, and so their id
        return mask

    def describe(self, mask: int) -> str:
        """The names of some digits.

        A part of an axis is named as the axis.
        """
        for name in _NAMES:
            if self.masks[name] == mask:
                return name
        names = ["the first and the last stage"] if mask & self.ends else []
        for name in _NAMES[:4]:
            if self.masks[name] & mask:
                names.append(name)
        return " and ".join(names)


def _digits(ranks: Ranks) -> Iterator[Digit]:
    """The digits of a group, ascending, from the differences between its ranks.

    >>> list(_digits((0, 1, 4, 5)))
    [Digit(stride=1, size=2), Digit(stride=4, size=2)]
    """
    offsets: Iterable[int] = [rank - ranks[0] for rank in ranks]
    rest = list(offsets)
    while len(rest) > 1:
        stride = rest[1]
        size = 1
        while size < len(rest) and rest[size] == size * stride:
            size += 1
        yield Digit(stride, size)
        rest = rest[::size]
