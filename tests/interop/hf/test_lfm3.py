"""LFM3: kinds of layers, and rotary positions of two of them."""

from typing import Any

import pytest

from nanotrain.config.model import ModelConfig
from nanotrain.config.schema import with_values
from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.families import config_to_hf, family_of
from nanotrain.interop.hf.lfm3 import LFM3_PARTS
from tests.interop.hf.test_llama_like import read

PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
RAW = {
    "layer_types": ["conv", "sliding_attention", "full_attention"],
    "num_hidden_layers": 3,
    "sliding_window": 8,
    "use_attention_gate": True,
    "use_sandwich_norm": True,
    "rope_parameters": {"full_attention": PROPORTIONAL, "sliding_attention": PLAIN},
}


def test_layers_and_bases_are_those_of_their_kinds_and_come_back() -> None:
    model = read("lfm3")
    assert model.mixers == ("short_conv", "attention", "attention", "short_conv")
    assert model.window_layers == (False, True, False, False) and model.window_size == 6
    assert model.rotary_proportional and model.rotary_percent == 0.5
    assert (model.rotary_base, model.rotary_base_local) == (1e6, 1e4)
    assert model.attention_output_gate and model.attention_output_gate_per_head
    written = config_to_hf(model, family=family_of(model))
    assert written["layer_types"][1:3] == ["sliding_attention", "full_attention"]
    assert written["rope_parameters"] == RAW["rope_parameters"]


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["sliding_attention"] * 3, {"rotary_base": 1e4, "window_attn_skip_freq": "0"}),
        (["full_attention"] * 3, {"rotary_base": 1e6, "linear_attention_type": None}),
        (["conv"] * 3, {"linear_attention_type": "short_conv", "norm_placement": "sandwich"}),
    ],
)
def test_layers_of_one_kind(kinds: list[str], expected: dict[str, Any]) -> None:
    values = LFM3_PARTS["lfm3_layers"].read(RAW | {"layer_types": kinds})
    assert expected.items() <= values.items()
    model = with_values(ModelConfig(num_layers=3), values)
    assert LFM3_PARTS["lfm3_layers"].write(model)["layer_types"] == kinds


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layer_types": ["mamba"] * 3}, "layer_types: 'mamba'"),
        ({"layer_types": ["conv"] * 2}, "of 2 layers"),
        ({"full_attention": PROPORTIONAL | {"factor": 2.0}}, "factor of full_attention: 2.0"),
        ({"full_attention": PLAIN | {"rope_type": "yarn"}}, "full_attention: 'yarn'"),
        ({"full_attention": None}, "full_attention in rope_parameters"),
        ({"sliding_attention": PROPORTIONAL}, "rope_type of sliding_attention"),
        (
            {"sliding_attention": PLAIN | {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor of sliding_attention: 0.5",
        ),
    ],
)
def test_features_we_lack_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    raw = RAW | {key: value for key, value in change.items() if key in RAW}
    tables = {key: value for key, value in change.items() if key not in RAW}
    raw["rope_parameters"] = RAW["rope_parameters"] | tables
    with pytest.raises(HuggingFaceError, match=named):
        LFM3_PARTS["lfm3_layers"].read(raw)
