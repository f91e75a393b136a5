"""Exact sums have the bits of no order, and nodes of the tree those of the full tree."""

import math

import pytest
import torch

from nanotrain.kernels.exact_sums import (
    exact_sum,
    from_units,
    join_bins,
    on_grid,
    square_bins,
    to_grid,
    token_sum,
    tree_sum,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_over_tokens_has_the_same_bits_in_every_order_and_split(dtype: torch.dtype) -> None:
    values = torch.randn(999, 7).mul_(1e-3).to(dtype)
    total = token_sum(values, num_addends=999)
    assert torch.equal(token_sum(values[torch.randperm(999)], num_addends=999), total)
    parts = [token_sum(part, num_addends=999) for part in values.split((5, 400, 594))]
    assert torch.equal((parts[2] + parts[0]) + parts[1], total)
    assert total.tolist() == pytest.approx(values.double().sum(0).tolist(), abs=1e-9)


def test_plain_sums_have_not() -> None:
    """Else the test above would hold for any sum."""
    values = torch.randn(999, 7).mul_(1e-3)
    orders = [values[torch.randperm(999)].sum(0) for _ in range(5)]
    assert any(not torch.equal(order, orders[0]) for order in orders)


def test_units_scale_without_rounding() -> None:
    values = torch.tensor([2.0**-44, 3.0, -0.25])
    total = exact_sum(to_grid(values)[None], dims=(0,), num_addends=1)
    assert torch.equal(from_units(total), values.double())
    assert float(on_grid(torch.tensor(1.25, dtype=torch.float64), 0.5)) == 1.0


def test_a_number_that_is_not_finite_stays_so() -> None:
    values = torch.tensor([[1.0, torch.inf], [torch.nan, 1.0]])
    assert not token_sum(values, num_addends=999).isfinite().any()
    assert not square_bins(torch.tensor([1.0, torch.inf]))[0].isfinite()
    assert not square_bins(torch.tensor([torch.nan, 1.0]))[0].isfinite()


def test_addends_whose_sum_would_be_rounded_have_none() -> None:
    """Half of 2^53 units of 2^-44, which a tied weight needs twice."""
    largest = torch.full((4, 3), 64.0)
    assert token_sum(largest, num_addends=4).tolist() == [256.0] * 3
    above = largest.clone()
    above[1, 2] = -torch.nextafter(torch.tensor(64.0), torch.tensor(65.0))
    assert token_sum(above, num_addends=4).isnan().all()
    assert token_sum(largest[:1], num_addends=5).isnan().all()  # the others are on other ranks
    # what was silent: the order changes the sum
    units = to_grid(torch.tensor([511.0, 511.0, 2.0**-44, -511.0, -511.0])).double()
    assert units.cumsum(0)[-1] != units[[0, 3, 1, 4, 2]].cumsum(0)[-1]


def test_squares_above_the_range_of_a_bin_have_no_norm() -> None:
    bins = square_bins(torch.full((4,), 2.0**9))
    assert float(join_bins(bins)) == 2.0**20
    bins[1] = 2.0**12 + 1
    assert join_bins(bins).isnan()


def test_squares_are_summed_exactly_in_any_split() -> None:
    magnitudes = torch.logspace(-12, 2, 5000, dtype=torch.float64)
    values = (torch.randn(5000, dtype=torch.float64) * magnitudes).float()
    bins = square_bins(values)
    shuffled = values[torch.randperm(5000)]
    assert torch.equal(square_bins(shuffled[:1234]) + square_bins(shuffled[1234:]), bins)
    expected = math.fsum(float(value) ** 2 for value in values.double())
    assert float(join_bins(bins)) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("num_nodes", [1, 2, 4, 8])
def test_nodes_of_aligned_blocks_add_up_to_the_tree(num_nodes: int) -> None:
    blocks = list(torch.randn(8, 100))
    width = 8 // num_nodes
    nodes = [tree_sum(blocks[first : first + width]) for first in range(0, 8, width)]
    assert torch.equal(tree_sum(nodes), tree_sum(blocks))


def test_other_orders_have_other_bits() -> None:
    blocks = list(torch.randn(8, 1000))
    assert not torch.equal(tree_sum(blocks), torch.stack(blocks).sum(0))
    assert not torch.equal(tree_sum(blocks), tree_sum([*blocks[1:], blocks[0]]))


def test_blocks_of_a_tree_are_a_power_of_two() -> None:
    with pytest.raises(AssertionError, match="3 blocks make no binary tree"):
        tree_sum(list(torch.ones(3, 1)))
