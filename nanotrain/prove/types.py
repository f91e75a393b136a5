"""`Type` of a tensor, and `TypeMap`: the types of ranges of storage.

    along an axis    values of the ranks                     sum over the axis
    ---------------  --------------------------------------  ---------------------------
    equal            replicated                              counts them several times
    varying          shards, or activations of own samples   only where activations are summed
    partial          parts of a sum                          the gradient

Types belong to bytes of storage, so a view has the type of what it views, a flat buffer has one
type per parameter, and a concatenation has those of its parts.
"""

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from torch import Tensor


class Type(NamedTuple):
    """Along which axes the values of ranks vary or are addends; along others they are equal."""

    varying: int = 0  # mask of axes
    partial: int = 0  # mask of axes over which the values are still to be summed
    # factor of a gradient, relative to the gradient of the loss; None for other tensors
    factor: float | None = None
    name: str = ""  # parameter of a gradient

    @property
    def differs(self) -> int:
        """Axes along which the ranks hold different values."""
        return self.varying | self.partial


# zeros or memory without values: as any type
ZERO = None


class Piece(NamedTuple):
    """Consecutive elements of a tensor, in the order of its dims."""

    first: int  # first element
    last: int  # element after the last one
    kind: Type | None


class _Segment(NamedTuple):
    """Bytes of a storage."""

    first: int  # first byte
    last: int  # byte after the last one
    kind: Type | None


def join(types: list[Type | None]) -> Type | None:
    """The type of a result that is computed from values of these types but is not their sum."""
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
    segments: list[_Segment]  # in order; bytes that are ZERO may be left out
    is_uniform: bool  # whether one segment has all bytes
    num_copies: int = 1  # equal parts that the storage consists of

    def segment_around(self, tensor: Tensor) -> _Segment | None:
        """The segment with all elements of a tensor; None if they are in several segments."""
        if self.is_uniform:
            return self.segments[0]
        first = int(tensor.storage_offset()) * tensor.itemsize
        last = first + tensor.itemsize
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            last += (size - 1) * stride * tensor.itemsize
        index = bisect_right(self.segments, first, key=lambda item: item.last)
        if index == len(self.segments):
            return None
        segment = self.segments[index]
        has_all = segment.first <= first and last <= segment.last
        return segment if has_all else None


class TypeMap:
    """Types by storage and byte range."""

    def __init__(self) -> None:
        self._storages: dict[int, _Storage] = {}

    def of(self, tensor: Tensor) -> Type | None:
        """The type of a tensor; if its pieces differ, of a value that depends on all of them."""
        stored = self._storages.get(tensor.untyped_storage()._cdata)
        if stored is None:
            return ZERO
        if stored.is_uniform:
            return stored.segments[0].kind
        types = {piece.kind for piece in self.pieces(tensor)}
        types.discard(ZERO)
        if len(types) < 2:
            return next(iter(types), ZERO)
        return join(list(types))

    def is_mixed(self, tensor: Tensor) -> bool:
        """Whether a tensor has several pieces of different types."""
        stored = self._storages.get(tensor.untyped_storage()._cdata)
        if stored is None or stored.is_uniform:
            return False
        return len(self.pieces(tensor)) > 1

    def pieces(self, tensor: Tensor) -> list[Piece]:
        """The types of all elements of a tensor, in order."""
        stored = self._storages.get(tensor.untyped_storage()._cdata)
        numel = tensor.numel()
        if stored is None or numel == 0:
            return [Piece(0, numel, ZERO)]
        around = stored.segment_around(tensor)
        if around is not None:
            return [Piece(0, numel, around.kind)]
        pieces: list[Piece] = []
        element = 0
        for first, last in _runs(tensor):
            for segment in _cover(stored.segments, first=first, last=last):
                stop = element + (segment.last - segment.first) // tensor.itemsize
                if pieces and pieces[-1].kind == segment.kind:
                    pieces[-1] = pieces[-1]._replace(last=stop)
                else:
                    pieces.append(Piece(element, stop, segment.kind))
                element = stop
        return pieces

    def set(self, tensor: Tensor, kind: Type | None) -> None:
        """Give all elements of a tensor a type."""
        numel = tensor.numel()
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        if 0 < numel * tensor.itemsize == num_bytes:
            self._replace(storage, [_Segment(0, num_bytes, kind)], is_uniform=True)
        elif numel:
            self.write(tensor, [Piece(0, numel, kind)])

    def write(self, tensor: Tensor, pieces: Sequence[Piece]) -> None:
        """Set the types of a tensor's elements; the pieces have all elements in their order."""
        storage = tensor.untyped_storage()
        written = list(_segments(tensor, pieces))
        stored = self._storages.get(storage._cdata)
        kept = [] if stored is None else _without(stored.segments, written)
        segments: list[_Segment] = []
        for segment in sorted([*kept, *written], key=lambda item: item.first):
            before = segments[-1] if segments else None
            if before and before.last == segment.first and before.kind == segment.kind:
                segments[-1] = before._replace(last=segment.last)
            else:
                segments.append(segment)
        first, last, _ = segments[0]
        # a storage of no bytes is memory that is freed for now
        is_uniform = first == 0 and last >= storage.nbytes() > 0
        self._replace(storage, segments, is_uniform=is_uniform)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Give a tensor the types of one with as many elements."""
        pieces = self.pieces(source)
        if len(pieces) == 1:
            self.set(target, pieces[0].kind)
        elif source.numel() == target.numel():
            self.write(target, pieces)
        else:  # broadcast
            self.set(target, self.of(source))

    def concatenate(self, sources: Iterable[Tensor], target: Tensor, *, dim: int) -> None:
        """Give a tensor the types of its parts along a dim."""
        parts = [source for source in sources if source.numel()]
        kinds = {self.of(part) for part in parts}
        if len(kinds) == 1 and not any(map(self.is_mixed, parts)):
            self.set(target, kinds.pop())
            return
        first = 0
        for part in parts:
            size = part.shape[dim]
            self.copy(part, target.narrow(dim, first, size))
            first += size

    def set_copies(self, tensor: Tensor, number: int) -> None:
        """Note that a tensor, all of its storage, consists of equal parts."""
        storage = tensor.untyped_storage()
        stored = self._storages.get(storage._cdata)
        if stored is not None and tensor.nbytes == storage.nbytes():
            stored.num_copies = number

    def num_copies(self, tensor: Tensor) -> int:
        """The equal parts that a tensor consists of, as far as known."""
        storage = tensor.untyped_storage()
        stored = self._storages.get(storage._cdata)
        if stored is None or tensor.nbytes != storage.nbytes() or not tensor.is_contiguous():
            return 1
        return stored.num_copies

    def _replace(self, storage: Any, segments: list[_Segment], *, is_uniform: bool) -> None:
        """Set the types of a storage."""
        key = storage._cdata
        stored = self._storages.get(key)
        if stored is None:
            reference = weakref.ref(storage, lambda _: self._storages.pop(key, None))
            self._storages[key] = _Storage(reference, segments, is_uniform)
            return
        stored.segments = segments
        stored.is_uniform = is_uniform
        stored.num_copies = 1


def _runs(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """The first byte and the byte after the last one of elements that lie side by side, in order.

    >>> [*_runs(torch.empty(2, 3, dtype=torch.int8)[:, 1:])]
    [(1, 3), (4, 6)]
    """
    start = int(tensor.storage_offset()) * tensor.itemsize
    if tensor.is_contiguous():
        yield start, start + tensor.numel() * tensor.itemsize
        return
    length = tensor.itemsize
    outer: list[Sequence[int]] = []
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        step = stride * tensor.itemsize
        if size == 1:
            continue
        if step == length and not outer:
            length *= size
        else:
            offsets = range(0, size * step, step) if step else [0] * size
            outer.insert(0, offsets)
    for steps in product(*outer):
        first = start + sum(steps)
        yield first, first + length


def _segments(tensor: Tensor, pieces: Sequence[Piece]) -> Iterator[_Segment]:
    """The bytes of the pieces of a tensor."""
    remaining = iter(pieces)
    piece = next(remaining)
    element = 0
    for first, last in _runs(tensor):
        while first < last:
            if element == piece.last:
                piece = next(remaining)
            stop = min(last, first + (piece.last - element) * tensor.itemsize)
            yield _Segment(first, stop, piece.kind)
            element += (stop - first) // tensor.itemsize
            first = stop


def _cover(segments: Sequence[_Segment], *, first: int, last: int) -> Iterator[_Segment]:
    """The segments of bytes [first, last), with segments of type ZERO in the gaps."""
    for index in range(bisect_right(segments, first, key=lambda item: item.last), len(segments)):
        segment = segments[index]
        if segment.first >= last:
            break
        if first < segment.first:
            yield _Segment(first, segment.first, ZERO)
            first = segment.first
        stop = min(segment.last, last)
        yield _Segment(first, stop, segment.kind)
        first = stop
    if first < last:
        yield _Segment(first, last, ZERO)


def _without(segments: Sequence[_Segment], written: Sequence[_Segment]) -> Iterator[_Segment]:
    """The parts of segments outside of the written bytes."""
    ordered = sorted(written, key=lambda item: item.first)
    for segment in segments:
        first = segment.first
        start = bisect_right(ordered, first, key=lambda item: item.last)
        for index in range(start, len(ordered)):
            other = ordered[index]
            if other.first >= segment.last:
                break
            if first < other.first:
                yield segment._replace(first=first, last=other.first)
            first = max(first, other.last)
        if first < segment.last:
            yield segment._replace(first=first)
