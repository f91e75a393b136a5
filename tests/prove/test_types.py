"""`TypeMap`: the types of ranges of storage, and of views of them."""

import random

import torch

from nanotrain.prove.types import ZERO, Piece, Type, TypeMap, join

VARYING = Type(varying=1)
PARTIAL = Type(partial=2)


def test_a_view_has_the_type_of_its_elements() -> None:
    types = TypeMap()
    flat = torch.empty(12, device="meta")
    types.set(flat, VARYING)
    types.set(flat[4:8], PARTIAL)
    assert types.of(flat[:4].view(2, 2)) == types.of(flat[8:]) == VARYING
    assert types.of(flat[5:6]) == PARTIAL
    assert [*types.pieces(flat)] == [(0, 4, VARYING), (4, 8, PARTIAL), (8, 12, VARYING)]
    # what depends on all elements varies along both axes, and is no partial sum
    assert types.of(flat) == Type(varying=3)


def test_memory_without_values_has_any_type() -> None:
    types = TypeMap()
    flat = torch.empty(4, device="meta")
    assert types.of(flat) is ZERO
    types.set(flat[:2], VARYING)
    assert types.of(flat) == VARYING
    types.set(flat, ZERO)
    assert types.of(flat) is ZERO


def test_a_view_of_columns_has_and_changes_their_types() -> None:
    types = TypeMap()
    matrix = torch.empty(3, 4, device="meta")
    types.set(matrix, VARYING)
    types.set(matrix[:, 1:3], PARTIAL)
    assert types.of(matrix[:, :1]) == types.of(matrix[1, 3:]) == VARYING
    assert types.of(matrix[:, 1:3]) == PARTIAL
    assert types.of(matrix) == types.of(matrix[1]) == Type(varying=3)
    transposed = matrix.t()
    assert types.pieces(transposed) == [(0, 3, VARYING), (3, 9, PARTIAL), (9, 12, VARYING)]
    types.set(matrix[:, 1:3], VARYING)
    assert types.pieces(matrix) == [(0, 12, VARYING)]


def test_pieces_are_those_of_single_elements() -> None:
    """Random writes to views, beside a type per byte."""
    rng = random.Random(0)
    types = TypeMap()
    tensor = torch.empty(4, 6, dtype=torch.int16, device="meta")
    bytes_of: list[Type | None] = [ZERO] * tensor.nbytes
    kinds = [ZERO, VARYING, PARTIAL, Type(varying=4)]
    for _ in range(200):
        first, last = sorted(rng.choices(range(5), k=2))
        rows = slice(first, last)
        first, last = sorted(rng.choices(range(7), k=2))
        columns = slice(first, last, rng.choice((1, 1, 2)))
        view = tensor[rows, columns]
        if rng.random() < 0.3:
            view = view.t()
        assert expanded(types.pieces(view)) == [bytes_of[2 * i] for i in elements_of(view)]
        kind = rng.choice(kinds)
        types.set(view, kind)
        for i in elements_of(view):
            bytes_of[2 * i : 2 * i + 2] = [kind, kind]


def elements_of(view: torch.Tensor) -> list[int]:
    """The elements of the storage that a matrix has, in order."""
    elements = []
    for row in range(view.shape[0]):
        for column in range(view.shape[1]):
            elements.append(int(view[row, column].storage_offset()))
    return elements


def expanded(pieces: list[Piece]) -> list[Type | None]:
    kinds = []
    for first, last, kind in pieces:
        kinds += [kind] * (last - first)
    return kinds


def test_memory_that_is_freed_keeps_the_types_of_its_parts() -> None:
    types = TypeMap()
    flat = torch.empty(8, device="meta")
    flat.untyped_storage().resize_(0)
    types.set(flat[:4], VARYING)
    types.set(flat[4:], PARTIAL)
    flat.untyped_storage().resize_(flat.nbytes)
    assert [types.of(part) for part in flat.split(4)] == [VARYING, PARTIAL]


def test_types_end_with_their_storage() -> None:
    types = TypeMap()
    for _ in range(3):
        types.set(torch.empty(2, device="meta"), VARYING)
    assert len(types._storages) <= 1


def test_a_result_varies_along_all_axes_of_its_inputs() -> None:
    assert join([VARYING, PARTIAL, ZERO]) == Type(varying=3)
    assert join([ZERO, ZERO]) is ZERO
