"""What to write and what to read, decided before a file is touched.

    split_box       a box -> pieces of bounded size                          (saving)
    tiling_fault    do these boxes tile the tensor exactly once? if not, where (saving)
    plan_reads      my boxes and the manifest -> which pieces to read, which part of each goes where (loading)

Pure: boxes and manifests in, frozen data out, so any rank's reads can be planned in one process without its tensors.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from nanotrain.checkpoint.manifest import Manifest, PieceEntry, TensorEntry
from nanotrain.errors import CheckpointError
from nanotrain.topology.boxes import Box, TensorBox

PIECE_BYTES = 32 * 2**20
"""A piece is read whole for its checksum, even for one row of it: its size bounds what a reader reads too much."""


@dataclass(frozen=True)
class Fill:
    """One copy: `piece[source.slices()]` goes to `tensor of wanted[target.slices()]`."""

    wanted: TensorBox
    source: Box
    target: Box


@dataclass(frozen=True)
class PieceRead:
    """One piece to read and the copies to make of it."""

    name: str
    dtype: str
    piece: PieceEntry
    fills: tuple[Fill, ...]


def split_box(box: Box, element_bytes: int, *, limit: int = PIECE_BYTES) -> tuple[Box, ...]:
    """Cut a box along its first dims into pieces of at most `limit` bytes, in C order.

    >>> [piece.start for piece in split_box(Box((0, 0), (5, 4)), 1, limit=8)]
    [(0, 0), (2, 0), (4, 0)]
    """
    if box.numel == 0:
        return ()
    dim = next((dim for dim, size in enumerate(box.shape) if size > 1), None)
    if dim is None or box.numel * element_bytes <= limit:
        return (box,)
    rows = max(1, limit // (box.numel // box.shape[dim] * element_bytes))
    first, last = box.start[dim], box.stop[dim]
    slabs = [_cut(box, dim, start=start, stop=min(start + rows, last)) for start in range(first, last, rows)]
    return tuple(piece for slab in slabs for piece in split_box(slab, element_bytes, limit=limit))


def tiling_fault(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Where the boxes fail to tile a tensor of this shape exactly once, or None when they do.

    Halves the tensor at an edge of some box, and each half again, until a cell holds one box: O(n log n) for the grids
    and flat ranges that ranks write, instead of the n*n of comparing pairs.
    """
    whole = Box.full(shape)
    for box in boxes:
        if len(box.start) != len(shape) or box.intersect(whole) != box:
            return f"{_text(box)} lies outside the tensor of shape {list(shape)}"
    cells = [(whole, list(boxes))] if whole.numel else []
    while cells:
        region, held = cells.pop()
        if not held:
            return f"{_text(region)} is written by nobody"
        cut = _cut_of(region, held)
        if cut is None:
            if len(held) > 1:
                return f"{_text(region)} is written {len(held)} times"
            continue
        dim, at = cut.dim, cut.at
        lower = [
            _cut(box, dim, start=box.start[dim], stop=min(at, box.stop[dim])) for box in held if box.start[dim] < at
        ]
        upper = [
            _cut(box, dim, start=max(at, box.start[dim]), stop=box.stop[dim]) for box in held if box.stop[dim] > at
        ]
        cells.append((_cut(region, dim, start=region.start[dim], stop=at), lower))
        cells.append((_cut(region, dim, start=at, stop=region.stop[dim]), upper))
    return None


def plan_reads(manifest: Manifest, wanted: Iterable[TensorBox]) -> dict[str, tuple[PieceRead, ...]]:
    """Which pieces fill the wanted boxes.

    Args:
        manifest: of the checkpoint to read; its tensors hold every wanted name in the wanted shape (`check_fits`).
        wanted: boxes of global tensors, in any tiling.

    Returns:
        file -> the pieces to read from it, each once, in the order of the manifest.

    Raises:
        CheckpointError: some wanted element is in no piece.
    """
    boxes_of: dict[str, list[TensorBox]] = {}
    for box in wanted:
        boxes_of.setdefault(box.name, []).append(box)
    reads: dict[str, list[PieceRead]] = {}
    for name, boxes in boxes_of.items():
        entry = manifest.tensors[name]
        index = _PieceIndex(entry)
        fills: dict[int, list[Fill]] = {}
        for box in boxes:
            _plan_box(box, entry, index=index, fills=fills)
        for position in sorted(fills):
            piece = entry.pieces[position]
            read = PieceRead(name, entry.dtype, piece, tuple(fills[position]))
            reads.setdefault(piece.file, []).append(read)
    return {file: tuple(found) for file, found in reads.items()}


def _plan_box(wanted: TensorBox, entry: TensorEntry, *, index: "_PieceIndex", fills: dict[int, list[Fill]]) -> None:
    filled = 0
    for position in index.candidates(wanted.box):
        piece = entry.pieces[position]
        shared = piece.box.intersect(wanted.box)
        if shared is not None and shared.numel:
            fills.setdefault(position, []).append(Fill(wanted, shared.within(piece.box), shared.within(wanted.box)))
            filled += shared.numel
    if filled != wanted.box.numel:
        raise CheckpointError(
            f"the checkpoint holds {filled} of the {wanted.box.numel} elements of {wanted.name} {_text(wanted.box)}",
            why="its pieces must tile every tensor exactly once",
            fix="load an older checkpoint of the run",
        )


@dataclass
class _PieceIndex:
    """Finds the pieces near a box: sorted by their start along the dim they are cut most, searched by bisection."""

    entry: TensorEntry
    dim: int = 0
    order: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    furthest: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        boxes = [piece.box for piece in self.entry.pieces]
        if not self.entry.shape:
            self.order = list(range(len(boxes)))
            return
        self.dim = max(range(len(self.entry.shape)), key=lambda dim: len({box.start[dim] for box in boxes}))
        self.order = sorted(range(len(boxes)), key=lambda position: boxes[position].start[self.dim])
        self.starts = [boxes[position].start[self.dim] for position in self.order]
        # The largest stop so far never falls, so bisection may skip every piece that ends before the box begins.
        self.furthest = list(accumulate((boxes[position].stop[self.dim] for position in self.order), max))

    def candidates(self, box: Box) -> list[int]:
        """Positions of every piece that may share an element with the box."""
        if not self.entry.shape:
            return self.order
        first = bisect_right(self.furthest, box.start[self.dim])
        return self.order[first : bisect_left(self.starts, box.stop[self.dim])]


@dataclass(frozen=True)
class _CutAt:
    dim: int
    at: int


def _cut_of(region: Box, boxes: Sequence[Box]) -> _CutAt | None:
    """The middle edge along the dim with most edges inside the region; None when every box is the whole region."""
    best: list[int] = []
    best_dim = 0
    for dim, (low, high) in enumerate(zip(region.start, region.stop, strict=True)):
        edges = {edge for box in boxes for edge in (box.start[dim], box.stop[dim]) if low < edge < high}
        if len(edges) > len(best):
            best, best_dim = sorted(edges), dim
    return _CutAt(best_dim, best[len(best) // 2]) if best else None


def _cut(box: Box, dim: int, *, start: int, stop: int) -> Box:
    if box.start[dim] == start and box.stop[dim] == stop:
        return box
    return Box(
        box.start[:dim] + (start,) + box.start[dim + 1 :],
        box.stop[:dim] + (stop,) + box.stop[dim + 1 :],
    )


def _text(box: Box) -> str:
    return "[" + ",".join(f"{start}:{stop}" for start, stop in zip(box.start, box.stop, strict=True)) + "]"
