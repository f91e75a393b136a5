"""`Type` of a tensor, and `TypeMap`: the types of ranges of storage.

    along an axis    values of the ranks                     sum over the axis
    ---------------  --------------------------------------  ---------------------------
    equal            replicated                              counts them several times
    varying          shards, or activations of own samples   only where activations are summed
    partial          parts of a sum                          the gradient

Types belong to storage, so a view has the type of what it views, and a flat buffer has one type per
parameter.
"""

import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


class Type(NamedTuple):
    """What ranks that differ along an axis hold; an axis in neither mask has equal values."""

    varying: int = 0  # mask of axes
    partial: int = 0  # mask of axes over which the values are still to be summed
    # factor of a gradient beside that of the loss; None for other tensors
    factor: float | None = None
    name: str = ""  # parameter of a gradient

    @property
    def differs(self) -> int:
        """Axes along which the ranks hold different values."""
        return self.varying | self.partial


# zeros or memory without values: as any type
ZERO = None
Segment = tuple[int, int, Type | None]  # first byte, byte after the last one


def join(types: list[Type | None]) -> Type | None:
    """The type of a result that depends on values of these types, as no sum."""
    varying = 0
    is_zero = True
    for item in types:
        if item is not None:
            varying |= item.varying | item.partial
            is_zero = False
    return None if is_zero else Type(varying)


@dataclass
class _Storage:
    """The types of one storage."""

    reference: Any  # weak, to drop the entry with the storage
    segments: list[Segment]
    is_uniform: bool  # whether one segment has all bytes


class Extent(NamedTuple):
    """The bytes of a storage that a tensor lies in."""

    start: int
    stop: int
    is_dense: bool  # whether all bytes between belong to the tensor


class TypeMap:
    """Types by storage and byte range."""

    def __init__(self) -> None:
        self._storages: dict[int, _Storage] = {}

    def of(self, tensor: Tensor) -> Type | None:
        """The type of a tensor: that of its only range, or of a value that depends on all."""
        stored = self._storages.get(tensor.untyped_storage()._cdata)
        if stored is None:
            return ZERO
        if stored.is_uniform:
            return stored.segments[0][2]
        types = {segment[2] for segment in self.segments(tensor)}
        types.discard(ZERO)
        if len(types) < 2:
            return next(iter(types), ZERO)
        return join(list(types))

    def is_mixed(self, tensor: Tensor) -> bool:
        """Whether ranges of a tensor have types of their own."""
        stored = self._storages.get(tensor.untyped_storage()._cdata)
        if stored is None or len(stored.segments) == 1:
            return False
        return len(self.segments(tensor)) > 1

    def segments(self, tensor: Tensor) -> list[Segment]:
        """The types of the bytes of a tensor, in order; bytes without a type are not listed."""
        stored = self._storages.get(tensor.untyped_storage()._cdata)
        if stored is None:
            return []
        extent = extent_of(tensor)
        if len(stored.segments) == 1:
            start, stop, kind = stored.segments[0]
            if start <= extent.start and extent.stop <= stop:
                return [(extent.start, extent.stop, kind)]
        found = []
        for start, stop, kind in stored.segments:
            first = max(start, extent.start)
            last = min(stop, extent.stop)
            if first < last:
                found.append((first, last, kind))
        return found

    def set(self, tensor: Tensor, kind: Type | None) -> None:
        """Give all elements of a tensor a type."""
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        if 0 < tensor.numel() * tensor.itemsize == num_bytes:  # the whole storage
            self._replace(storage, [(0, num_bytes, kind)], is_uniform=True)
            return
        extent = extent_of(tensor)
        if not extent.is_dense:
            kind = _mix(kind, self.of(tensor))
        self.write(tensor, [(extent.start, extent.stop, kind)])

    def write(self, tensor: Tensor, segments: list[Segment]) -> None:
        """Set ranges of the storage of a tensor, in order."""
        storage = tensor.untyped_storage()
        start = segments[0][0]
        stop = segments[-1][1]
        stored = self._storages.get(storage._cdata)
        is_whole = start == 0 and stop >= storage.nbytes() > 0
        if stored is None or is_whole:
            self._replace(storage, segments, is_uniform=is_whole and len(segments) == 1)
            return
        before = []
        after = []
        for segment in stored.segments:
            if segment[0] < start:
                before.append((segment[0], min(segment[1], start), segment[2]))
            if segment[1] > stop:
                after.append((max(segment[0], stop), segment[1], segment[2]))
        stored.segments = [*before, *segments, *after]
        stored.is_uniform = False

    def _replace(self, storage: Any, segments: list[Segment], *, is_uniform: bool) -> None:
        """Set the types of a storage."""
        key = storage._cdata
        stored = self._storages.get(key)
        if stored is None:
            reference = weakref.ref(storage, lambda _: self._storages.pop(key, None))
            self._storages[key] = _Storage(reference, segments, is_uniform)
            return
        stored.segments = segments
        stored.is_uniform = is_uniform


def extent_of(tensor: Tensor) -> Extent:
    """The bytes of a tensor in its storage."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    if tensor.is_contiguous():
        return Extent(start, start + tensor.numel() * tensor.itemsize, True)
    last = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride
    is_dense = last == tensor.numel()
    return Extent(start, start + max(last, 0) * tensor.itemsize, is_dense)


def _mix(new: Type | None, old: Type | None) -> Type | None:
    """The type of elements of which only some are written."""
    if new is None or old is None or new == old:
        return new or old
    return join([new, old])
