"""Positions of selected keys, and the gradients of rows of keys that are gathered."""

import torch

from nanotrain.attention.gathered import Rows, SelectedKeys, add_rows, take_rows


def test_positions_ascend_and_end_with_minus_one() -> None:
    mask = torch.tensor([[[1, 0, 1, 0], [0, 1, 1, 1], [0, 0, 0, 1]]]).bool()
    selected = SelectedKeys.of(mask, topk=3, first_query=1)
    assert selected.positions.tolist() == [[[0, 2, -1], [1, 2, 3], [3, -1, -1]]]
    assert selected.rows(slice(0, 1)).positions.tolist() == [[[0, 2]]], "keys up to the query"
    all_keys = SelectedKeys.of(mask, topk=9, first_query=1)
    assert all_keys.positions.shape[-1] == 4 and torch.equal(all_keys.mask.sum(-1), mask.sum(-1))


def test_gradients_of_taken_rows_are_added_where_they_were_taken() -> None:
    x = torch.arange(24.0).view(2, 4, 3)
    positions = torch.tensor([[[0, 3], [3, 3]], [[1, 2], [0, 1]]])
    taken = take_rows(x, positions)
    assert torch.equal(taken[1, 0, 1], x[1, 2]) and taken.shape == (2, 2, 2, 3)
    total = torch.ones_like(x)
    add_rows(total, positions, values=torch.ones_like(taken))
    assert total[..., 0].tolist() == [[2, 1, 1, 4], [2, 3, 2, 1]]


def test_the_backward_of_rows_is_that_of_autograd() -> None:
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(4, 3, 6, generator=draw, dtype=torch.float64, requires_grad=True)
    keys = torch.randn(4, 5, 6, generator=draw, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(4, 1, 5, dtype=torch.bool)
    mask[1, :, 3:] = False
    scores = (0.3 * query @ keys.mT).masked_fill(~mask, -torch.inf)
    out = scores.softmax(-1) @ keys[..., :4]
    grad = torch.randn(out.shape, generator=draw, dtype=torch.float64)
    expected = torch.autograd.grad(out, (query, keys), grad)
    with torch.no_grad():
        rows = Rows(query, keys, mask, value_dim=4, scale=0.3)
        result = rows.forward()
        found = rows.backward(lse=result.lse, sums=(out * grad).sum(-1), grad=grad)
    torch.testing.assert_close((result.out, found.out), (out, out))
    torch.testing.assert_close((found.query, found.keys), expected)
