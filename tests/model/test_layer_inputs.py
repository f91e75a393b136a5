"""Inputs of its own for each layer, against their formulas in fp64."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from nanotrain.model.context import LayerContext
from nanotrain.model.layer_inputs import layer_input_state
from tests.model.building import LLAMA, VOCAB, build, randomize

MODEL = replace(LLAMA, activation="geglu_tanh", layer_input_size=6, layer_scale=True)


def normalized(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def test_inputs_are_the_sum_of_an_embedding_and_a_projection() -> None:
    stage = randomize(build(MODEL)).double()
    module = stage.layer_inputs
    assert module is not None
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (2, 5), generator=draw)
    embedded = torch.randn(2, 5, 32, generator=draw, dtype=torch.float64)
    own = module.embedding.weight[tokens] * module.embedding_scale
    assert abs(module.embedding_scale - 6**0.5) < 1e-6
    projected = (embedded @ module.projection.weight.T * 32**-0.5).unflatten(-1, (2, 6))
    expected = (normalized(projected, module.norm.weight) + own.unflatten(-1, (2, 6))) / 2**0.5
    torch.testing.assert_close(module(tokens, embedded), expected, rtol=0, atol=1e-10)


def test_a_layer_adds_its_gated_input_and_is_scaled() -> None:
    stage = randomize(build(MODEL)).double()
    block = stage.layers["1"]
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(2, 5, 32, generator=draw, dtype=torch.float64)
    inputs = torch.randn(2, 5, 2, 6, generator=draw, dtype=torch.float64)
    context = LayerContext(state=layer_input_state(inputs))
    half = block.layer_input
    gated = F.gelu(x @ half.gate.weight.T, approximate="tanh") * inputs[:, :, 1]
    added = normalized(gated @ half.projection.weight.T, half.norm.weight)
    torch.testing.assert_close(half(x, context), x + added, rtol=0, atol=1e-10)

    plain = build(replace(MODEL, layer_input_size=0, layer_scale=False)).double()
    weights = dict(block.state_dict())
    plain.layers["1"].load_state_dict(weights, strict=False)
    expected = half(plain.layers["1"](x, LayerContext()), context) * block.layer_scale.weight
    torch.testing.assert_close(block(x, context), expected, rtol=0, atol=1e-10)
