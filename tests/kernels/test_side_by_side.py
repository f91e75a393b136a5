"""Slices of one tensor are joined without a copy, and new tensors lie as others do."""

from itertools import permutations

import pytest
import torch

from nanotrain.kernels.side_by_side import empty_sides, join_sides, order_of_sides

SIZES = (4, 2, 3)


def test_slices_of_one_tensor_are_joined_without_a_copy() -> None:
    total = torch.randn(2, 6, sum(SIZES))
    parts = total.split(SIZES, -1)
    assert order_of_sides(parts) == (0, 1, 2) and order_of_sides(parts[::-1]) == (2, 1, 0)
    assert join_sides(parts).data_ptr() == total.data_ptr() and torch.equal(join_sides(parts), total)
    for others in (parts[::-1], (parts[0], parts[2]), [part.contiguous() for part in parts], total.mT.split(2, -1)):
        joined = join_sides(others)
        assert joined.data_ptr() != others[0].data_ptr() and torch.equal(joined, torch.cat([*others], -1))
    assert order_of_sides((parts[0], parts[2])) is None
    rows = [part.reshape(-1, part.shape[-1]) for part in parts]
    assert join_sides(rows).data_ptr() == total.data_ptr(), "tokens of all samples are one dim"


@pytest.mark.parametrize("order", [*permutations(range(3)), None])
def test_new_tensors_lie_in_an_order(order: tuple[int, ...] | None) -> None:
    parts = empty_sides(SIZES, order, like=torch.empty(2, 6, 1, dtype=torch.bfloat16))
    assert [part.shape for part in parts] == [(2, 6, size) for size in SIZES] and parts[0].dtype is torch.bfloat16
    assert order_of_sides(parts) == order
