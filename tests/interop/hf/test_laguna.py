"""Laguna: query heads, gates and rotary positions by kind of layer."""

from typing import Any

import pytest

from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.families import config_to_hf
from tests.interop.hf.test_llama_like import read


def test_heads_gates_and_shares_are_those_of_their_kinds_and_come_back() -> None:
    model = read("laguna")
    assert (model.num_attention_heads, model.window_num_attention_heads) == (4, 8)
    assert model.attention_output_gate_activation == "softplus"
    assert model.attention_output_gate_per_head
    assert (model.rotary_percent, model.window_rotary_percent) == (0.5, 1.0)
    written = config_to_hf(model, family="laguna")
    assert written["num_attention_heads_per_layer"] == [4, 8, 8]
    assert written["gating"] == "per-head"
    shares = [table["partial_rotary_factor"] for table in written["rope_parameters"].values()]
    assert shares == [0.5, 1.0]


def test_channels_without_a_share_are_all_rotated() -> None:
    tables = {
        "full_attention": {"rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_theta": 1e4},
    }
    model = read("laguna", rope_parameters=tables)
    assert (model.rotary_percent, model.window_rotary_percent) == (0.25, 1.0)


def test_layers_of_one_kind() -> None:
    windows = {"layer_types": ["sliding_attention"] * 3, "num_attention_heads_per_layer": [8] * 3}
    model = read("laguna", **windows)
    assert all(model.window_layers) and model.num_attention_heads == 8
    assert config_to_hf(model, family="laguna")["num_attention_heads_per_layer"] == [8, 8, 8]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"gating": False}, "gating"),
        ({"moe_router_logit_softcapping": 5.0}, "moe_router_logit_softcapping"),
        ({"num_attention_heads_per_layer": [4, 8, 4]}, "heads_per_layer"),
        ({"num_attention_heads_per_layer": [4, 8]}, "of 2 layers"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "sliding_attention in rope_parameters",
        ),
    ],
)
def test_features_we_lack_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(HuggingFaceError, match=named):
        read("laguna", **change)
