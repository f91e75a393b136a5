"""Index scores and the keys that they select."""

import torch

from nanotrain.attention import selection
from nanotrain.attention.selection import Index


def test_of_equal_scores_the_earlier_keys_are_selected() -> None:
    scores = torch.tensor([[1.0, 0.0, 2.0, 0.0, 0.0, -1.0], [3.0, 3.0, 3.0, 3.0, 3.0, 3.0]])
    assert selection.highest(scores, 4).int().tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0]]
    assert selection.highest(scores, 9).all(), "fewer keys than may be selected"
    hidden = torch.tensor([[0.5, -torch.inf, -torch.inf]])
    assert selection.highest(hidden, 1).int().tolist() == [[1, 0, 0]]


def test_scores_of_gathered_keys_are_those_of_all_keys() -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = ((2, 5, 3, 4), (2, 9, 4), (2, 5, 3))
    query, key, weight = (
        torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes
    )
    index = Index(query, key, weight, topk=3)
    rows = slice(1, 4)
    found = index.scores(rows, key)
    products = torch.einsum("bqie,bke->bqki", query, key).relu() * (3 * 4) ** -0.5
    expected = torch.einsum("bqki,bqi->bqk", products, weight)[:, rows]
    torch.testing.assert_close(found.summed, expected)
    gathered = index.scores(rows, key[:, None, 2:5].expand(-1, 3, -1, -1))
    torch.testing.assert_close(gathered.summed, expected[..., 2:5])
    mask = torch.ones(1, 3, 9, dtype=torch.bool)
    assert (found.select(mask, topk=3).sum(-1) == 3).all()
    assert found.select(mask, topk=9).all(), "no more keys than may be selected"
