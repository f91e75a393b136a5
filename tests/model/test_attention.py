"""Attention: the core against the formula, masks, grouped heads."""

import pytest
import torch

from nanotrain.model.attention import Attention, Context, attend, document_mask
from tests.model.building import LLAMA, build, give_storage


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_the_core_is_softmax_of_scores_over_the_past(groups: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 10, 6, 8, generator=generator)
    key, value = (torch.randn(2, 10, groups, 8, generator=generator) for _ in range(2))
    out = attend(query, key=key, value=value, mask=None)
    for head in range(6):
        group = head // (6 // groups)
        scores = query[:, :, head] @ key[:, :, group].mT / 8**0.5
        scores = scores.masked_fill(torch.ones(10, 10).triu(1).bool(), float("-inf"))
        torch.testing.assert_close(out[:, :, head], scores.softmax(-1) @ value[:, :, group])


def test_the_document_mask_is_causal_and_ends_at_borders() -> None:
    mask = document_mask(torch.tensor([[0, 0, 1, 1, 1]], dtype=torch.int32))
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert mask.shape == (1, 1, 5, 5)
    assert mask[0, 0].int().tolist() == expected


def test_one_document_is_plain_causal() -> None:
    layer = build(LLAMA).layers["0"].attention
    hidden = torch.randn(2, 9, 32)
    masked = Context(mask=document_mask(torch.zeros(2, 9, dtype=torch.int32)))
    torch.testing.assert_close(layer(hidden, masked), layer(hidden, Context()))


def test_a_layer_that_holds_half_of_the_heads_computes_those_heads() -> None:
    whole = build(LLAMA).layers["0"].attention
    halves = [Attention(LLAMA, dtype=torch.float32) for _ in range(2)]
    hidden, total = torch.randn(2, 9, 32), torch.zeros(2, 9, 32)
    for rank, half in enumerate(halves):
        # Given the projections cut as two tp ranks hold them ...
        for name in ("query", "key", "value", "output"):
            weight = getattr(whole, name).weight.detach()
            piece = weight.chunk(2, dim=1 if name == "output" else 0)[rank]
            getattr(half, name)._parameters["weight"] = torch.nn.Parameter(piece)
        # ... when each runs, then their outputs add up.
        total = total + half(hidden, Context())
    torch.testing.assert_close(total, whole(hidden, Context()))
    assert give_storage(halves[0]).query.weight.shape == (16, 32)
