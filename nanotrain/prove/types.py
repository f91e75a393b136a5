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
from bisect import bisect_left, bisect_right
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
    """The types of the bytes of a storage.

    `kinds[i]` is the type from byte `borders[i]` to the next border, or on to the end.
    """

    reference: Any  # weak, to drop the entry with the storage
    borders: list[int]  # from 0 on, ascending
    kinds: list[Type | None]
    num_copies: int = 1  # equal parts that the storage consists of

    def ranges(self, first: int, last: int) -> Iterator[tuple[int, Type | None]]:
        """The number of bytes of each type among bytes [first, last), in order."""
        index = bisect_right(self.borders, first)
        for border in self.borders[index:]:
            if border >= last:
                break
            yield border - first, self.kinds[index - 1]
            first = border
            index += 1
        yield last - first, self.kinds[index - 1]

    def kinds_between(self, first: int, last: int) -> list[Type | None]:
        """The types of bytes [first, last), in order."""
        index = bisect_right(self.borders, first)
        return self.kinds[index - 1 : bisect_left(self.borders, last, lo=index)]

    def assign(self, kind: Type | None, *, first: int, last: int) -> None:
        """Give bytes [first, last) a type."""
        start = bisect_left(self.borders, first)
        stop = bisect_right(self.borders, last)
        after = self.kinds[stop - 1]
        self.borders[start:stop] = [first, last]
        self.kinds[start:stop] = [kind, after]


class TypeMap:
    """Types by storage and byte range."""

    def __init__(self) -> None:
        self._storages: dict[int, _Storage] = {}

    def of(self, tensor: Tensor) -> Type | None:
        """The type of a tensor; if its pieces differ, of a value that depends on all of them."""
        stored = self._storages.get(tensor.untyped_storage()._cdata)
        if stored is None:
            return ZERO
        if len(stored.kinds) == 1:
            return stored.kinds[0]
        first, last = _extent(tensor)
        types = set(stored.kinds_between(first, last))
        if len(types) > 1 and last - first != tensor.nbytes:  # some bytes between are not its own
            types = {piece.kind for piece in self.pieces(tensor)}
        types.discard(ZERO)
        if len(types) < 2:
            return next(iter(types), ZERO)
        return join(list(types))

    def is_mixed(self, tensor: Tensor) -> bool:
        """Whether a tensor has several pieces of different types."""
        stored = self._storages.get(tensor.untyped_storage()._cdata)
        if stored is None or len(stored.kinds) == 1:
            return False
        return len(self.pieces(tensor)) > 1

    def pieces(self, tensor: Tensor) -> list[Piece]:
        """The types of all elements of a tensor, in order."""
        stored = self._storages.get(tensor.untyped_storage()._cdata)
        numel = tensor.numel()
        if stored is None or numel == 0:
            return [Piece(0, numel, ZERO)]
        kinds = stored.kinds_between(*_extent(tensor))
        if kinds.count(kinds[0]) == len(kinds):
            return [Piece(0, numel, kinds[0])]
        itemsize = tensor.itemsize
        pieces: list[Piece] = []
        element = 0
        for begin, end in _runs(tensor):
            for num_bytes, kind in stored.ranges(begin, end):
                stop = element + num_bytes // itemsize
                if pieces and pieces[-1].kind == kind:
                    pieces[-1] = Piece(pieces[-1].first, stop, kind)
                else:
                    pieces.append(Piece(element, stop, kind))
                element = stop
        return pieces

    def set(self, tensor: Tensor, kind: Type | None) -> None:
        """Give all elements of a tensor a type."""
        numel = tensor.numel()
        storage = tensor.untyped_storage()
        if 0 < numel * tensor.itemsize == storage.nbytes():
            stored = self._stored(storage)
            stored.borders = [0]
            stored.kinds = [kind]
        elif numel:
            self.write(tensor, [Piece(0, numel, kind)])

    def write(self, tensor: Tensor, pieces: Sequence[Piece]) -> None:
        """Give the elements of a tensor types, all of them and in order."""
        if len(pieces) == 1 and tensor.nbytes == tensor.untyped_storage().nbytes():
            self.set(tensor, pieces[0].kind)
            return
        stored = self._stored(tensor.untyped_storage())
        remaining = iter(pieces)
        piece = next(remaining)
        element = 0
        for first, last in _runs(tensor):
            while first < last:
                if element == piece.last:
                    piece = next(remaining)
                stop = min(last, first + (piece.last - element) * tensor.itemsize)
                stored.assign(piece.kind, first=first, last=stop)
                element += (stop - first) // tensor.itemsize
                first = stop

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
        if tensor.nbytes == storage.nbytes():
            self._stored(storage).num_copies = number

    def num_copies(self, tensor: Tensor) -> int:
        """The equal parts that a tensor consists of, as far as known."""
        storage = tensor.untyped_storage()
        stored = self._storages.get(storage._cdata)
        if stored is None or tensor.nbytes != storage.nbytes() or not tensor.is_contiguous():
            return 1
        return stored.num_copies

    def _stored(self, storage: Any) -> _Storage:
        """The types of a storage that is about to change."""
        key = storage._cdata
        stored = self._storages.get(key)
        if stored is None:
            reference = weakref.ref(storage, lambda _: self._storages.pop(key, None))
            stored = _Storage(reference, [0], [ZERO])
            self._storages[key] = stored
        stored.num_copies = 1
        return stored


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the byte after its last one."""
    first = int(tensor.storage_offset())
    last = first + 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride
    return first * tensor.itemsize, last * tensor.itemsize


def _runs(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """The first byte and the byte after the last one of elements that lie side by side, in order.

    >>> import torch
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
