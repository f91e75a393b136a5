"""A grid of ranks: named axes, the fastest-varying first.

    Grid(("tp", "pp"), (2, 2))        pp 0: ranks 0 1
                                      pp 1: ranks 2 3

A rank is the mixed-radix number of its coordinates. Whatever is asked of a grid follows from the strides of
its axes, so a question about one rank costs as much as its answer is long, for any number of ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Grid:
    """Ranks 0 .. world_size-1 arranged along named axes.

    Args:
        axes: names, the fastest-varying axis first.
        sizes: ranks along each axis.

    >>> grid = Grid(("tp", "dp", "pp"), (2, 2, 2))
    >>> grid.coords(6)
    {'tp': 0, 'dp': 1, 'pp': 1}
    >>> grid.groups("dp")
    ((0, 2), (1, 3), (4, 6), (5, 7))
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.axes) == len(self.sizes), (
            f"{self.axes} need as many sizes, not {self.sizes}: ranks would be lost"
        )
        assert len(set(self.axes)) == len(self.axes), (
            f"an axis stands twice in {self.axes}: its ranks would be counted twice"
        )
        assert all(size >= 1 for size in self.sizes), f"sizes {self.sizes} of {self.axes}: an empty axis holds no rank"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.sizes)

    def size(self, axis: str) -> int:
        """Ranks along an axis."""
        return self.sizes[self.axes.index(axis)]

    def stride(self, axis: str) -> int:
        """Distance between neighbours along an axis, in ranks."""
        return prod(self.sizes[: self.axes.index(axis)])

    def coords(self, rank: int) -> dict[str, int]:
        """The place of a rank on every axis."""
        self._check(rank)
        return {axis: rank // self.stride(axis) % self.size(axis) for axis in self.axes}

    def rank(self, coords: Mapping[str, int]) -> int:
        """The rank at a place; the inverse of `coords`, other keys are ignored."""
        for axis, size in zip(self.axes, self.sizes, strict=True):
            assert 0 <= coords[axis] < size, (
                f"{axis}={coords[axis]} lies outside an axis of {size}: it would name a foreign rank"
            )
        return sum(coords[axis] * self.stride(axis) for axis in self.axes)

    def members(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axes` only, ascending, itself included."""
        coords = self.coords(rank)
        first = rank - sum(coords[axis] * self.stride(axis) for axis in axes)
        return tuple(first + offset for offset in self._offsets(axes))

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Every group of ranks that differ along `axes` only; each rank stands in exactly one."""
        offsets = self._offsets(axes)
        firsts = self._offsets(tuple(axis for axis in self.axes if axis not in axes))
        return tuple(tuple(first + offset for offset in offsets) for first in firsts)

    def _offsets(self, axes: tuple[str, ...]) -> list[int]:
        """Distances of a group's members from its first; ascending, because slower axes are walked later."""
        offsets = [0]
        for axis in sorted(axes, key=self.axes.index):
            stride = self.stride(axis)
            offsets = [step * stride + offset for step in range(self.size(axis)) for offset in offsets]
        return offsets

    def _check(self, rank: int) -> None:
        assert 0 <= rank < self.world_size, f"rank {rank} lies outside a world of {self.world_size}: it has no place"
