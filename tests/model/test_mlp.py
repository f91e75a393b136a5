"""An MLP is its formula, with a gate and without, beside the experts of other layers."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from nanotrain.config.layer_kinds import MoEConfig
from nanotrain.model.context import LayerContext
from nanotrain.model.mlp import MLP
from nanotrain.model.moe import MoELayer
from tests.model.building import GPT2, LLAMA, build, randomize

X = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))


def test_a_gated_mlp_is_its_formula() -> None:
    mlp = randomize(build(LLAMA)).layers["0"].mlp
    gate, up, down = (getattr(mlp, name).weight for name in ("gate", "up", "down"))
    assert gate.shape == up.shape == (48, 32) and down.shape == (32, 48)
    expected = (F.silu(X @ gate.T) * (X @ up.T)) @ down.T
    torch.testing.assert_close(mlp(X, LayerContext()), expected)


def test_without_a_gate_it_has_two_projections_with_their_biases() -> None:
    mlp = randomize(build(GPT2)).layers["0"].mlp
    assert mlp.gate is None
    inner = F.gelu(X @ mlp.up.weight.T + mlp.up.bias, approximate="tanh")
    expected = inner @ mlp.down.weight.T + mlp.down.bias
    torch.testing.assert_close(mlp(X, LayerContext()), expected)


@pytest.mark.parametrize("shared", [None, 40])
def test_layers_have_the_mlp_that_they_declare(shared: int | None) -> None:
    moe = MoEConfig(
        num_experts=4,
        router_topk=2,
        ffn_hidden_size=24,
        layer_freq="2",
        shared_expert_intermediate_size=shared,
    )
    layers = build(replace(LLAMA, moe=moe)).layers
    kinds = {type(layer.mlp) for layer in layers.values()}
    assert kinds == {MLP, MoELayer}
    (experts,) = (layer.mlp for layer in layers.values() if isinstance(layer.mlp, MoELayer))
    if shared is None:
        assert experts.shared is None
    else:
        assert experts.shared.up.weight.shape == (40, 32)
        assert experts.shared.dropout is None, "the layer drops the sum"


def test_dropout_is_that_of_the_mlp_in_its_layer() -> None:
    stage = build(replace(LLAMA, hidden_dropout=0.5))
    dropouts = [layer.mlp.dropout for layer in stage.layers.values()]
    assert [dropout.layer for dropout in dropouts] == [0, 1]
    x = randomize(stage).layers["1"].mlp(X, LayerContext())
    assert (x != 0).all(), "without the places of samples nothing is dropped"
