"""A layer of Mamba-2 equals that of transformers, inside documents too."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHConfig, NemotronHMamba2Mixer

from nanotrain.config.layer_kinds import MambaConfig
from nanotrain.model.context import LayerContext
from tests.model.building import LLAMA
from tests.model.mixers import assert_near, backward, random_hidden, random_mixer

SIZES = MambaConfig(state_dim=6, head_dim=8, num_groups=2, num_heads=4, time_step_min=0.3)
MAMBA = replace(LLAMA, linear_attention_type="mamba2", mamba=SIZES)
CONVOLVED = ("value_conv", "key_conv", "query_conv")


class In64Bits(SimpleNamespace):
    """torch with fp64 in place of fp32, to which transformers casts."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def in_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    monkeypatch.setattr(modeling_nemotron_h, "torch", In64Bits())


@pytest.mark.parametrize("chunk_size", [4, 16])
def test_a_layer_is_that_of_transformers(chunk_size: int, in_64_bits: None) -> None:
    ours = random_mixer(MAMBA)
    config = NemotronHConfig(
        hidden_size=32, mamba_num_heads=4, mamba_head_dim=8, ssm_state_size=6, n_groups=2, chunk_size=chunk_size,
        layer_norm_epsilon=1e-6, time_step_min=0.3, layers_block_type=["mamba"], use_conv_bias=True,
    )  # fmt: skip
    theirs = NemotronHMamba2Mixer(config, 0).double()
    joined = {
        "in_proj.weight": [ours.gate, ours.value, ours.key, ours.query, ours.step],
        "conv1d.weight": [getattr(ours, name) for name in CONVOLVED],
    }
    pairs = {"dt_bias": "step_bias", "A_log": "decay", "D": "skip", "norm.weight": "norm"}
    pairs |= {"out_proj.weight": "output.weight"}
    params = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, modules in joined.items():
            params[name].copy_(
                torch.cat([module.weight for module in modules]).view_as(params[name])
            )
        params["conv1d.bias"].copy_(torch.cat([getattr(ours, name).bias for name in CONVOLVED]))
        for name, own in pairs.items():
            params[name].copy_(ours.get_parameter(own))
    hidden = random_hidden(2, 21, 32)

    found = backward(ours(hidden, LayerContext()), hidden, ours)
    expected = backward(theirs(hidden), hidden, theirs)

    grads = dict(zip([name for name, _ in ours.named_parameters()], found[2:], strict=True))
    of_theirs = dict(zip(params, expected[2:], strict=True))
    assert_near(found[:2], expected[:2])
    for name, own in pairs.items():
        assert_near([grads[own]], [of_theirs[name]])
    projections = torch.cat(
        [grads[f"{name}.weight"] for name in ("gate", "value", "key", "query", "step")]
    )
    weights, biases = (
        torch.cat([grads[f"{name}.{leaf}"] for name in CONVOLVED]) for leaf in ("weight", "bias")
    )
    convolutions = of_theirs["conv1d.weight"].squeeze(1), of_theirs["conv1d.bias"]
    assert_near([projections, weights, biases], [of_theirs["in_proj.weight"], *convolutions])


def test_documents_are_read_as_if_apart() -> None:
    module, hidden = random_mixer(MAMBA), random_hidden(2, 12, 32)
    segment_ids = torch.tensor([[0] * 5 + [1] + [2] * 6, [0] * 12])

    found = backward(module(hidden, LayerContext(segment_ids=segment_ids)), hidden, module)

    parts = [module(part, LayerContext()) for part in hidden[:1].split((5, 1, 6), dim=1)]
    out = torch.cat((torch.cat(parts, dim=1), module(hidden[1:], LayerContext())))
    assert_near(found, backward(out, hidden, module))
