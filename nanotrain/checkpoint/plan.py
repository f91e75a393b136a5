"""Plans of writes and reads (pure): boxes and manifests in, frozen data out, for any rank.

split_box         saving: a box -> chunks of bounded size
coverage_fault    saving and loading: whether boxes cover a tensor exactly once, and where not
plan_reads        loading, resharding: target boxes and manifest -> the chunks to read and the
                  copies to make
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nanotrain.checkpoint.manifest import ChunkEntry, Manifest, TensorEntry, damaged
from nanotrain.spec.boxes import Box, TensorBox

CHUNK_BYTES = 32 * 2**20
"""A chunk is always read in full, for its checksum: its size bounds the bytes that a reader
discards.
"""


@dataclass(frozen=True)
class ChunkCopy:
    """One copy: `chunk[source.slices()]` to `tensor_of(target)[dest.slices()]`."""

    target: TensorBox
    source: Box
    dest: Box


@dataclass(frozen=True)
class ChunkRead:
    """One chunk to read and the copies to make of it."""

    name: str
    dtype: str
    chunk: ChunkEntry
    copies: tuple[ChunkCopy, ...]


def split_box(box: Box, element_bytes: int, *, limit: int = CHUNK_BYTES) -> tuple[Box, ...]:
    """Split a box along its first dims into chunks of at most `limit` bytes, in C order.

    >>> [chunk.start for chunk in split_box(Box((0, 0), (5, 4)), 1, limit=8)]
    [(0, 0), (2, 0), (4, 0)]
    """
    if box.numel == 0:
        return ()
    dim = next((dim for dim, size in enumerate(box.shape) if size > 1), None)
    if dim is None or box.numel * element_bytes <= limit:
        return (box,)
    row_bytes = box.numel // box.shape[dim] * element_bytes
    rows = max(1, limit // row_bytes)
    chunks: list[Box] = []
    end = box.stop[dim]
    for start in range(box.start[dim], end, rows):
        slab = _slice(box, dim, start=start, stop=min(start + rows, end))
        chunks.extend(split_box(slab, element_bytes, limit=limit))
    return tuple(chunks)


def coverage_fault(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Where boxes fail to cover every element of a tensor exactly once, or None."""
    full = Box.full(shape)
    if list(boxes) == [full] or _are_slabs(shape, boxes):
        return None
    for box in boxes:
        if len(box.start) != len(shape) or box.intersect(full) != box:
            return f"[{box.text}] lies outside the tensor of shape {list(shape)}"
    return _region_fault(full, boxes) if full.numel else None


def _region_fault(full: Box, boxes: Sequence[Box]) -> str | None:
    """The first region that no box or several boxes cover, or None.

    Halves the tensor at an edge of some box, and each half again, until a region holds one box: O(n
    log n) for the grids and flat ranges that ranks write, instead of O(n^2) for comparing pairs.
    """
    regions = [(full, list(boxes))]
    while regions:
        region, inside = regions.pop()
        if not inside:
            return f"[{region.text}] is written by no rank"
        edge = _middle_edge(region, inside)
        if edge is None:
            if len(inside) > 1:
                return f"[{region.text}] is written {len(inside)} times"
            continue
        dim, at = edge
        lower = _slice(region, dim, start=region.start[dim], stop=at)
        upper = _slice(region, dim, start=at, stop=region.stop[dim])
        for half in (lower, upper):
            parts = [box.intersect(half) for box in inside]
            regions.append((half, [part for part in parts if part is not None]))
    return None


def plan_reads(
    manifest: Manifest, targets: Iterable[TensorBox]
) -> dict[str, tuple[ChunkRead, ...]]:
    """Plan which chunks to read for the target boxes.

    Args:
        manifest: manifest of the checkpoint, with the tensors of all targets in their shapes
            (`check_compatible`).
        targets: boxes of global tensors, sharded in any way.

    Returns:
        file -> the chunks to read from it, each once, in the order of the manifest.

    Raises:
        DamagedCheckpoint: the chunks of a tensor do not cover it exactly once.
    """
    boxes_by_name: dict[str, list[TensorBox]] = {}
    for box in targets:
        boxes_by_name.setdefault(box.name, []).append(box)
    reads: dict[str, list[ChunkRead]] = {}
    for name, boxes in boxes_by_name.items():
        entry = manifest.tensors[name]
        fault = coverage_fault(entry.shape, [chunk.box for chunk in entry.chunks])
        if fault is not None:
            what = f"the checkpoint of step {manifest.step} does not cover {name} exactly once"
            raise damaged(what, why=fault)
        copies_of_chunks = _plan_copies(entry, boxes)
        for chunk_index, copies in sorted(copies_of_chunks.items()):
            chunk = entry.chunks[chunk_index]
            read = ChunkRead(name, entry.dtype, chunk, tuple(copies))
            reads.setdefault(chunk.file, []).append(read)
    return {file: tuple(chunks) for file, chunks in reads.items()}


def _plan_copies(entry: TensorEntry, targets: Sequence[TensorBox]) -> dict[int, list[ChunkCopy]]:
    """The copies from each chunk of a tensor, by number of the chunk."""
    starts, stops = _corners([chunk.box for chunk in entry.chunks], len(entry.shape))
    copies: dict[int, list[ChunkCopy]] = {}
    for target in targets:
        overlaps = ((starts < target.box.stop) & (stops > target.box.start)).all(axis=1)
        for chunk_index in np.flatnonzero(overlaps).tolist():
            inner = entry.chunks[chunk_index].box
            shared = inner.intersect(target.box)
            if shared is not None:
                copy = ChunkCopy(target, shared.within(inner), shared.within(target.box))
                copies.setdefault(chunk_index, []).append(copy)
    return copies


def _corners(boxes: Sequence[Box], num_dims: int) -> NDArray[np.int64]:
    """Starts and stops of boxes, [2, number of boxes, number of dims]."""
    starts = [box.start for box in boxes]
    stops = [box.stop for box in boxes]
    return np.array([starts, stops], dtype=np.int64).reshape(2, len(boxes), num_dims)


def _are_slabs(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Whether boxes are slabs of one dim, end to end.

    Nearly all tensors are, and this takes a tenth of the search.
    """
    if not boxes or any(len(box.start) != len(shape) for box in boxes):
        return False
    starts, stops = _corners(boxes, len(shape))
    is_split = (starts != 0) | (stops != shape)
    split_dims = np.flatnonzero(is_split.any(axis=0))
    if len(split_dims) != 1:
        return False
    dim = split_dims[0]
    # How many slabs hold an index follows from their edges alone, whichever start belongs to which
    # stop.
    lower_edges = sorted(starts[:, dim])
    upper_edges = sorted(stops[:, dim])
    return np.array_equal([*lower_edges, shape[dim]], [0, *upper_edges])


def _middle_edge(region: Box, boxes: Sequence[Box]) -> tuple[int, int] | None:
    """The dim with the most edges inside the region, and its middle edge; None without an edge."""
    best: list[int] = []
    best_dim = 0
    for dim in range(len(region.start)):
        edges = {box.start[dim] for box in boxes}
        edges |= {box.stop[dim] for box in boxes}
        inner = [edge for edge in edges if region.start[dim] < edge < region.stop[dim]]
        if len(inner) > len(best):
            best = sorted(inner)
            best_dim = dim
    if not best:
        return None
    middle = best[len(best) // 2]
    return best_dim, middle


def _slice(box: Box, dim: int, *, start: int, stop: int) -> Box:
    """The part of a box between two indices of a dim."""
    starts = list(box.start)
    stops = list(box.stop)
    starts[dim] = start
    stops[dim] = stop
    return Box(tuple(starts), tuple(stops))
