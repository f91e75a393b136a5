"""Index scores and the keys that they select."""

import torch

from nanotrain.attention import selection
from nanotrain.attention.selection import Index, IndexGradients, IndexKeys


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


def test_keys_of_16_bits_are_those_that_sums_in_fp64_select() -> None:
    draw = torch.Generator().manual_seed(2)
    shapes = ((1, 64, 4, 64), (1, 512, 64), (1, 64, 4))
    query, key, weight = (torch.randn(shape, generator=draw).bfloat16() for shape in shapes)
    mask = torch.ones(1, 64, 512, dtype=torch.bool)

    def selected(dtype: torch.dtype) -> torch.Tensor:
        index = Index(query.to(dtype), key.to(dtype), weight.to(dtype), topk=32)
        return index.scores(slice(0, 64), index.key).select(mask, topk=32)

    expected = selected(torch.float64)
    assert torch.equal(selected(torch.bfloat16), expected)
    # products in 16 bits would select others
    products = torch.einsum("bqie,bke->bqki", query, key).relu().float()
    narrow = torch.einsum("bqki,bqi->bqk", products, weight.float())
    assert not torch.equal(selection.highest(narrow, 32), expected)


def test_gradients_of_16_bits_are_those_of_fp64_within_their_rounding() -> None:
    draw = torch.Generator().manual_seed(2)
    shapes = ((1, 16, 4, 64), (1, 32, 64), (1, 16, 4))
    tensors = [torch.randn(shape, generator=draw).bfloat16() for shape in shapes]
    mask = torch.ones(1, 16, 32, dtype=torch.bool)
    target = torch.rand(1, 16, 32, generator=draw, dtype=torch.float64).softmax(-1)
    found = {}
    for dtype in (torch.bfloat16, torch.float64):
        index = Index(*(x.to(dtype) for x in tensors), topk=32)
        gradients = IndexGradients.zeros(index)
        scores = index.scores(slice(0, 16), index.key)
        rows = {"mask": mask, "target": target.to(scores.summed.dtype)}
        gradients.add(slice(0, 16), scores=scores, keys=IndexKeys(index.key), **rows)
        found[dtype] = [gradients.query, gradients.key, gradients.weight]
    for narrow, wide in zip(found[torch.bfloat16], found[torch.float64], strict=True):
        assert (narrow - wide).abs().max() < 2**-8 * wide.abs().max()
