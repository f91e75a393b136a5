"""Heads by kind of layer and rotary positions in the config.json of Gemma 4."""

from typing import Any

import pytest

from nanotrain.config.schema import value_of
from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.families import config_from_hf, config_to_hf, family_of

KINDS = ["sliding_attention"] * 5 + ["full_attention"]
# the sizes of the dense model of 31B, with six of its layers
DENSE: dict[str, Any] = {
    "model_type": "gemma4_text",
    "attention_k_eq_v": True,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_size": 5376,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 21504,
    "layer_types": KINDS,
    "num_attention_heads": 32,
    "num_global_key_value_heads": 4,
    "num_hidden_layers": 6,
    "num_key_value_heads": 16,
    "final_logit_softcapping": 30.0,
    "sliding_window": 1024,
}
HEADS = {
    "kv_channels": 512,
    "window_kv_channels": 256,
    "num_query_groups": 4,
    "window_query_groups": 16,
    "window_size": 1023,
    "softmax_scale": 1.0,
    "rotary_percent": 0.25,
    "rotary_base": 1e6,
    "rotary_base_local": 1e4,
}


def test_heads_of_layers_without_a_window_are_read_from_both_formats() -> None:
    model = config_from_hf(DENSE)
    assert {key: value_of(model, key) for key in HEADS} == HEADS
    assert family_of(model) == "gemma4_text"
    written = config_to_hf(model, family="gemma4_text")
    assert written["per_layer_config"] == {5: {"head_dim": 512, "num_key_value_heads": 4}}
    assert written["global_head_dim"] == 512 and written["num_global_key_value_heads"] == 4
    assert config_from_hf(written) == model


def test_a_model_whose_last_layer_has_a_window_is_not_written() -> None:
    model = config_from_hf(DENSE | {"layer_types": ["full_attention", *KINDS[:5]]})
    # transformers makes it full attention, whatever the file says
    assert model.window_layers == (False, True, True, True, True, False)


PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 1000},
        "vocab_size_per_layer_input",
    ),
    (
        {
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 64,
            "num_kv_shared_layers": 1,
            "use_double_wide_mlp": True,
        },
        "use_double_wide_mlp",
    ),
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    (
        {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN}},
        "rope_type of full_attention",
    ),
    (
        {
            "rope_parameters": {
                "full_attention": PROPORTIONAL | {"factor": 8.0},
                "sliding_attention": PLAIN,
            }
        },
        "factor of full_attention",
    ),
]


@pytest.mark.parametrize("entries, name", REFUSED)
def test_what_it_cannot_express_is_refused_by_name(entries: dict[str, Any], name: str) -> None:
    with pytest.raises(HuggingFaceError) as error:
        config_from_hf(DENSE | entries)
    assert name in error.value.what
