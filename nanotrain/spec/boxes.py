"""Boxes: axis-aligned regions of a tensor, in the coordinates of the global tensor.

Init, clipping, optimizer state, checkpoints and Hugging Face files name a part of a tensor as
(name, Box). `flat_range_to_boxes` is the only conversion from flat buffers to boxes. Example,
elements [2, 11) of a [3, 4] tensor:

        . . 0 0         0  (0:1, 2:4)   end of the first row
        1 1 1 1         1  (1:2, 0:4)   full rows
        2 2 2 .         2  (2:3, 0:3)   start of the last row
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from operator import add, ge, le, sub
from typing import Self


@dataclass(frozen=True)
class Box:
    """The elements start <= index < stop, in every dim.

    >>> Box((0, 2), (2, 5)).intersect(Box((1, 0), (3, 4)))
    Box(start=(1, 2), stop=(2, 4))
    """

    start: tuple[int, ...]  # first index per dim; () for a scalar
    stop: tuple[int, ...]  # index after the last per dim

    @classmethod
    def full(cls, shape: Sequence[int]) -> Self:
        """The box that contains all elements of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def text(self) -> str:
        """The box as text: "0:128,0:64"."""
        bounds = zip(self.start, self.stop, strict=True)
        return ",".join(f"{start}:{stop}" for start, stop in bounds)

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along every dim."""
        return tuple(map(sub, self.stop, self.start))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return prod(self.shape)

    def slices(self) -> tuple[slice, ...]:
        """The index that selects this box from the global tensor."""
        return tuple(slice(start, stop) for start, stop in zip(self.start, self.stop, strict=True))

    def intersect(self, other: "Box") -> "Box | None":
        """The elements in both boxes, or None if there are none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(map(ge, start, stop)):
            return None
        return Box(start, stop)

    def within(self, outer: "Box") -> "Box":
        """This box relative to `outer`, which must contain it: the index into a tensor of outer's
        shape.
        """
        starts_inside = all(map(le, outer.start, self.start))
        is_inside = starts_inside and all(map(le, self.stop, outer.stop))
        assert is_inside, f"{self} is not inside {outer}: elements outside would be read"
        return self.shifted([-offset for offset in outer.start])

    def shifted(self, offset: Sequence[int]) -> "Box":
        """This box moved by `offset`, one number per dim."""
        start = tuple(map(add, self.start, offset))
        stop = tuple(map(add, self.stop, offset))
        return Box(start, stop)


@dataclass(frozen=True)
class TensorBox:
    """A box of a named global tensor; the key of a local tensor of shape `box.shape`."""

    name: str  # the tensor's global name
    shape: tuple[int, ...]  # the global shape, over all ranks
    box: Box  # the region

    @classmethod
    def full(cls, name: str, shape: Sequence[int]) -> Self:
        """All elements of a tensor."""
        return cls(name, tuple(shape), Box.full(shape))


def flat_range_to_boxes(shape: Sequence[int], *, start: int, stop: int) -> tuple[Box, ...]:
    """Split elements [start, stop) of a row-major tensor (shape () for a scalar) into boxes, in
    flat order.

    Returns:
        At most 2*ndim-1 boxes (1 for a scalar), none empty, disjoint; concatenated they are the
        range.

    >>> [box.slices() for box in flat_range_to_boxes((4,), start=1, stop=3)]
    [(slice(1, 3, None),)]
    >>> len(flat_range_to_boxes((3, 4), start=2, stop=11))
    3
    """
    assert 0 <= start <= stop <= prod(shape), (
        f"[{start}, {stop}) is outside a tensor of shape {tuple(shape)}"
    )
    if start == stop:
        return ()
    if not shape:
        return (Box((), ()),)
    row_numel = prod(shape[1:])
    first_full = -(-start // row_numel)
    last_full = stop // row_numel
    if first_full > last_full:  # the range is inside one row
        return _in_row(shape, last_full, start=start, stop=stop)
    boxes = _in_row(shape, first_full - 1, start=start, stop=first_full * row_numel)
    if first_full < last_full:
        row_starts = (0,) * (len(shape) - 1)
        boxes += (Box((first_full, *row_starts), (last_full, *shape[1:])),)
    return boxes + _in_row(shape, last_full, start=last_full * row_numel, stop=stop)


def _in_row(shape: Sequence[int], row: int, *, start: int, stop: int) -> tuple[Box, ...]:
    """Flat range [start, stop) of the tensor, inside row `row`, as boxes of the tensor."""
    first = row * prod(shape[1:])
    boxes = []
    for inner in flat_range_to_boxes(shape[1:], start=start - first, stop=stop - first):
        boxes.append(Box((row, *inner.start), (row + 1, *inner.stop)))
    return tuple(boxes)
