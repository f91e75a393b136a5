"""Boxes select their elements, and a flat range equals the boxes it is split into."""

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.spec.boxes import Box, TensorBox, flat_range_to_boxes

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def boxes_of(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    pairs = [st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted) for size in shape]
    return st.tuples(*pairs).map(
        lambda ends: Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))
    )


def elements(shape: tuple[int, ...], box: Box) -> np.ndarray:
    return np.arange(prod(shape)).reshape(shape)[box.slices()]


@given(shapes, st.data())
def test_a_flat_range_is_the_concatenation_of_its_boxes(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    # given
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, prod(shape))] * 2)))

    # when
    boxes = flat_range_to_boxes(shape, start=start, stop=stop)

    # then
    read = [int(index) for box in boxes for index in np.ravel(elements(shape, box))]
    assert read == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(box.numel > 0 for box in boxes)


@given(shapes)
def test_the_full_flat_range_is_one_box(shape: tuple[int, ...]) -> None:
    assert flat_range_to_boxes(shape, start=0, stop=prod(shape)) == (Box.full(shape),)


def test_the_bound_on_the_number_of_boxes_is_reached() -> None:
    assert len(flat_range_to_boxes((4, 4, 4), start=1, stop=63)) == 5


def test_nothing_and_tensors_without_elements_have_no_boxes() -> None:
    assert flat_range_to_boxes((3, 4), start=5, stop=5) == ()
    assert flat_range_to_boxes((3, 0, 4), start=0, stop=0) == ()
    assert flat_range_to_boxes((), start=0, stop=0) == ()


@given(shapes, st.data())
def test_an_intersection_has_the_elements_of_both_boxes(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    # given
    a, b = data.draw(boxes_of(shape)), data.draw(boxes_of(shape))

    # when
    shared = a.intersect(b)

    # then
    expected = np.intersect1d(elements(shape, a), elements(shape, b))
    actual = [] if shared is None else np.sort(np.ravel(elements(shape, shared)))
    assert list(actual) == list(expected)
    assert b.intersect(a) == shared


@given(shapes, st.data())
def test_a_box_within_another_indexes_its_tensor(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    # given: a box and its intersection with another
    outer, box = data.draw(boxes_of(shape)), data.draw(boxes_of(shape))
    shared = outer.intersect(box)
    if shared is None:
        return

    # when
    local = shared.within(outer)

    # then
    assert np.array_equal(elements(shape, outer)[local.slices()], elements(shape, shared))
    assert local.shifted(outer.start) == shared


@given(shapes, st.data())
def test_a_box_counts_its_elements(shape: tuple[int, ...], data: st.DataObject) -> None:
    box = data.draw(boxes_of(shape))

    assert elements(shape, box).shape == box.shape
    assert elements(shape, box).size == box.numel


def test_equal_boxes_are_equal_keys() -> None:
    values = {TensorBox.full("weight", (2, 3)): 1}

    assert values[TensorBox("weight", (2, 3), Box((0, 0), (2, 3)))] == 1
