"""Attention to keys and values of an earlier layer, against its formula in fp64."""

from dataclasses import replace

import torch

from nanotrain.model.context import LayerContext
from nanotrain.model.shared_kv import SharedKVAttention
from nanotrain.spec.shape import Source
from tests.model.building import QWEN3, build, randomize

MODEL = replace(
    QWEN3, num_layers=2, num_kv_shared_layers=1, position_embedding_type="none", softmax_scale=0.3
)


def test_queries_attend_to_the_keys_of_the_source() -> None:
    stage = randomize(build(MODEL)).double()
    attention = stage.layers["1"].attention
    assert isinstance(attention, SharedKVAttention)
    draw = torch.Generator().manual_seed(2)
    hidden, key, value = (
        torch.randn(2, 7, *dims, generator=draw, dtype=torch.float64, requires_grad=True)
        for dims in ((32,), (2, 16), (2, 16))
    )
    context = LayerContext()
    context.keep(Source("key_value", 0), key, value)
    found = attention(hidden, context)

    query = (hidden @ attention.query.weight.T).unflatten(-1, (4, 16))
    variance = query.square().mean(-1, keepdim=True)
    query = query * torch.rsqrt(variance + 1e-6) * attention.query_norm.weight
    scores = torch.einsum("bqgnd,bkgd->bgnqk", query.unflatten(2, (2, 2)), key) * 0.3
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
    attended = torch.einsum("bgnqk,bkgd->bqgnd", weights, value).flatten(2)
    expected = attended @ attention.output.weight.T
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)

    inputs = (hidden, key, value)
    ours = torch.autograd.grad(found.square().sum(), inputs)
    theirs = torch.autograd.grad(expected.square().sum(), inputs)
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-9)


def test_a_second_forward_keeps_what_the_first_kept() -> None:
    context = LayerContext()
    source = Source("key_value", 0)
    first, second = torch.ones(1), torch.zeros(1)
    context.keep(source, first)
    context.keep(source, second)
    assert torch.equal(context.state[source][0], first)
