"""Attention: documents, a part of the heads."""

import torch

from nanotrain.model.attention import Attention, Context
from nanotrain.parallel.cp.sdpa import segment_mask
from tests.model.building import LLAMA, build, give_storage


def test_one_document_is_plain_causal() -> None:
    layer = build(LLAMA).layers["0"].attention
    hidden = torch.randn(2, 9, 32)
    masked = Context(mask=segment_mask(torch.zeros(2, 9, dtype=torch.int32)))
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
