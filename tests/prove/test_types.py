"""`TypeMap`: the types of ranges of storage, and of views of them."""

import torch

from nanotrain.prove.types import ZERO, Type, TypeMap, join

VARYING = Type(varying=1)
PARTIAL = Type(partial=2)


def test_a_view_has_the_type_of_its_elements() -> None:
    types = TypeMap()
    flat = torch.empty(12, device="meta")
    types.set(flat, VARYING)
    types.set(flat[4:8], PARTIAL)
    assert types.of(flat[:4].view(2, 2)) == types.of(flat[8:]) == VARYING
    assert types.of(flat[5:6]) == PARTIAL
    assert [kind for _, _, kind in types.segments(flat)] == [VARYING, PARTIAL, VARYING]
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


def test_a_strided_view_changes_some_elements_of_what_it_spans() -> None:
    types = TypeMap()
    matrix = torch.empty(4, 4, device="meta")
    types.set(matrix, VARYING)
    types.set(matrix[:, :2], Type(varying=2))
    assert types.of(matrix) == Type(varying=3)


def test_types_end_with_their_storage() -> None:
    types = TypeMap()
    for _ in range(3):
        types.set(torch.empty(2, device="meta"), VARYING)
    assert len(types._storages) <= 1


def test_a_result_varies_along_all_axes_of_its_inputs() -> None:
    assert join([VARYING, PARTIAL, ZERO]) == Type(varying=3)
    assert join([ZERO, ZERO]) is ZERO
