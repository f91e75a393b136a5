"""Plans: chunks of bounded size, exact covers told from others, and any sharding read into any
other.
"""

import time
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from nanotrain.checkpoint.manifest import ChunkEntry, Manifest, TensorEntry
from nanotrain.checkpoint.plan import coverage_fault, plan_reads, split_box
from nanotrain.errors import CheckpointError
from nanotrain.spec.boxes import Box, TensorBox, flat_range_to_boxes

shapes = st.lists(st.integers(1, 7), max_size=3).map(tuple)


@st.composite
def covers(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A random exact cover: the tensor split in two, a part of it split in two, and so on; in
    random order.
    """
    boxes = [Box.full(shape)]
    for _ in range(draw(st.integers(0, 8))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [dim for dim, size in enumerate(box.shape) if size > 1]
        if not dims:
            boxes.append(box)
            continue
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(box.start[dim] + 1, box.stop[dim] - 1))
        boxes.append(Box(box.start, (*box.stop[:dim], at, *box.stop[dim + 1 :])))
        boxes.append(Box((*box.start[:dim], at, *box.start[dim + 1 :]), box.stop))
    return draw(st.permutations(boxes))


def manifest_of(shape: tuple[int, ...], boxes: list[Box]) -> Manifest:
    chunks = tuple(
        ChunkEntry(box, f"file-{i % 3}", f"t@{i}", "0", 4 * box.numel)
        for i, box in enumerate(boxes)
    )
    return Manifest(1, {}, {"t": TensorEntry(shape, "fp32", chunks)}, {}, {}, {})


@given(shapes, st.integers(1, 40))
def test_chunks_cover_the_box_within_the_limit(shape: tuple[int, ...], limit: int) -> None:
    chunks = split_box(Box.full(shape), 2, limit=limit)

    assert coverage_fault(shape, chunks) is None
    assert all(chunk.numel * 2 <= max(limit, 2) for chunk in chunks)


def test_an_empty_box_has_no_chunks() -> None:
    assert split_box(Box((0, 3), (4, 3)), 4) == ()


@given(st.data(), shapes)
def test_an_exact_cover_has_no_fault_and_one_box_too_few_or_twice_has_one(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    boxes = data.draw(covers(shape))
    odd = data.draw(st.sampled_from(boxes))

    assert coverage_fault(shape, boxes) is None
    assert "written 2 times" in str(coverage_fault(shape, [*boxes, odd]))
    assert "written by no rank" in str(coverage_fault(shape, [box for box in boxes if box != odd]))


def test_a_hole_that_an_overlap_of_the_same_size_makes_up_for_is_found() -> None:
    boxes = [Box((0, 0), (2, 4)), Box((1, 0), (2, 4)), Box((3, 0), (4, 4))]

    assert sum(box.numel for box in boxes) == 16
    assert coverage_fault((4, 4), boxes) is not None


def test_a_box_outside_the_tensor_or_of_other_dims_is_found() -> None:
    assert "outside" in str(coverage_fault((4,), [Box((0,), (5,))]))
    assert "outside" in str(coverage_fault((4,), [Box((0, 0), (4, 1))]))


@given(st.data(), shapes)
def test_any_sharding_is_read_into_any_other_bit_for_bit(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    """Given a tensor saved in one sharding, the copies into another rebuild it and read each chunk
    once.
    """
    saved, targets = data.draw(covers(shape)), data.draw(covers(shape))
    manifest = manifest_of(shape, saved)
    tensor = torch.randn(shape)
    result = torch.full(shape, torch.nan)

    reads = plan_reads(manifest, [TensorBox("t", shape, box) for box in targets])

    keys = [read.chunk.key for file in reads.values() for read in file]
    assert len(keys) == len(set(keys)) == len(saved)
    for file, chunks in reads.items():
        for read in chunks:
            assert read.chunk.file == file
            chunk = tensor[read.chunk.box.slices()]
            for copy in read.copies:
                result[copy.target.box.slices()][copy.dest.slices()] = chunk[copy.source.slices()]
    assert torch.equal(result, tensor)


@given(st.data(), shapes)
def test_only_chunks_that_share_an_element_are_read(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    saved = data.draw(covers(shape))
    targets = data.draw(st.sampled_from(data.draw(covers(shape))))

    reads = plan_reads(manifest_of(shape, saved), [TensorBox("t", shape, targets)])

    read = {chunk.chunk.box for file in reads.values() for chunk in file}
    assert read == {box for box in saved if box.intersect(targets)}


def test_an_element_in_no_chunk_is_an_error_with_the_numbers() -> None:
    manifest = manifest_of((4, 2), [Box((0, 0), (3, 2))])

    with pytest.raises(
        CheckpointError, match=r"does not cover t exactly once: \[3:4,0:2\] is written by no rank"
    ):
        plan_reads(manifest, [TensorBox("t", (4, 2), Box((2, 0), (4, 2)))])


@pytest.mark.parametrize("layout", ["flat ranges", "grid", "columns"])
def test_thousands_of_chunks_are_checked_and_planned_in_seconds(layout: str) -> None:
    """Comparing every pair would take minutes; the bound is loose, the machine may be busy."""
    num, side = 2_500, 1_000
    shape = (side, side)
    step = side * side // num
    boxes = {
        "flat ranges": [
            box
            for i in range(num)
            for box in flat_range_to_boxes(shape, start=i * step, stop=(i + 1) * step)
        ],
        "grid": [
            Box((i, j), (i + 20, j + 10)) for i in range(0, side, 20) for j in range(0, side, 10)
        ],
        "columns": [
            Box((i, j), (i + side // 5, j + 1))
            for i in range(0, side, side // 5)
            for j in range(side)
        ],
    }[layout]
    manifest = manifest_of(shape, boxes)
    targets = [
        TensorBox("t", shape, box)
        for box in flat_range_to_boxes(shape, start=side * 7 + 5, stop=side * 9 + 5)
    ]

    start = time.process_time()
    assert coverage_fault(shape, boxes) is None
    reads = plan_reads(manifest, targets)

    assert time.process_time() - start < 5, "the square of the number would take minutes"
    assert reads


def test_a_scalar_is_planned_like_any_tensor() -> None:
    manifest = manifest_of((), [Box((), ())])

    (read,) = plan_reads(manifest, [TensorBox("t", (), Box((), ()))])["file-0"]

    assert replace(read.copies[0], target=TensorBox("t", (), Box((), ()))) == read.copies[0]
