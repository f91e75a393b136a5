"""A grid of ranks with named axes, the fastest-varying first.

    Grid(("tp", "pp"), (2, 2))        pp 0: ranks 0 1
                                      pp 1: ranks 2 3

A rank is the mixed-radix number of its coordinates. The methods about one rank compute with the strides of the axes, so
their cost does not depend on the number of ranks; `groups` lists all of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
from einops import rearrange
from numpy.typing import NDArray


@dataclass(frozen=True)
class Grid:
    """Ranks 0 .. world_size-1 arranged along named axes.

    >>> grid = Grid(("tp", "dp", "pp"), (2, 2, 2))
    >>> grid.coords(6)
    {'tp': 0, 'dp': 1, 'pp': 1}
    >>> grid.groups("dp")
    ((0, 2), (1, 3), (4, 6), (5, 7))
    """

    axes: tuple[str, ...]  # names, the fastest-varying axis first
    sizes: tuple[int, ...]  # ranks along each axis

    def __post_init__(self) -> None:
        assert len(self.axes) == len(self.sizes), f"{len(self.sizes)} sizes for the axes {self.axes}"
        assert len(set(self.axes)) == len(self.axes), f"duplicate axis in {self.axes}"
        assert all(size >= 1 for size in self.sizes), f"sizes {self.sizes} of {self.axes} must be at least 1"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.sizes)

    def size(self, axis: str) -> int:
        """Ranks along an axis."""
        return self.sizes[self.axes.index(axis)]

    def stride(self, axis: str) -> int:
        """Difference in rank between neighbours along an axis."""
        return prod(self.sizes[: self.axes.index(axis)])

    def coords(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank on every axis."""
        assert 0 <= rank < self.world_size, f"rank {rank} is outside a grid of {self.world_size} ranks"
        return {axis: rank // self.stride(axis) % self.size(axis) for axis in self.axes}

    def rank(self, coords: Mapping[str, int]) -> int:
        """The rank at these coordinates; the inverse of `coords`, other keys are ignored."""
        for axis, size in zip(self.axes, self.sizes, strict=True):
            assert 0 <= coords[axis] < size, f"{axis}={coords[axis]} is outside an axis of size {size}"
        return sum(coords[axis] * self.stride(axis) for axis in self.axes)

    def members(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axes` only, ascending, `rank` included."""
        coords = self.coords(rank)
        ranks = [rank - sum(coords[axis] * self.stride(axis) for axis in axes)]
        for axis in sorted(axes, key=self.axes.index):  # slower axes last, so that ranks ascend
            ranks = [step * self.stride(axis) + first for step in range(self.size(axis)) for first in ranks]
        return tuple(ranks)

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Every group of ranks that differ along `axes` only, ascending; each rank is in exactly one."""
        slowest_first = self.axes[::-1]
        inside = " ".join(axis for axis in slowest_first if axis in axes)
        outside = " ".join(axis for axis in slowest_first if axis not in axes)
        pattern = f"({' '.join(slowest_first)}) -> ({outside}) ({inside})"
        sizes = dict(zip(self.axes, self.sizes, strict=True))
        ranks: NDArray[np.int64] = np.arange(self.world_size)
        return tuple(tuple(group) for group in rearrange(ranks, pattern, **sizes).tolist())
