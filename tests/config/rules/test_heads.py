"""Rules of heads by kind of layer and of shared keys: just allowed, and just refused."""

from typing import Any

import pytest

from tests.config.rules.test_boundaries import messages_of

WINDOWS: dict[str, Any] = {"window_size": 4, "window_attn_skip_freq": "2"}
KEYS: dict[str, Any] = {"attention_k_eq_v": True}
# settings, and a part of the message; "" where they are allowed
CASES: list[tuple[dict[str, Any], str]] = [
    ({"num_kv_shared_layers": 3}, ""),
    ({"num_kv_shared_layers": 4}, "num_kv_shared_layers 4 of 4 layers"),
    ({"num_kv_shared_layers": 1, "hybrid_layer_pattern": "*-*-"}, "MLPs of a pattern"),
    (WINDOWS | {"num_kv_shared_layers": 2}, ""),
    (WINDOWS | {"num_kv_shared_layers": 3}, "has the keys of layer 1"),
    ({"num_kv_shared_layers": 2, "no_rope_freq": "[0,0,0,1]"}, "has the keys of layer 3"),
    ({"num_kv_shared_layers": 2, "no_rope_freq": "[0,1,0,1]"}, ""),
    (WINDOWS | {"window_kv_channels": 32}, ""),
    (WINDOWS | {"window_kv_channels": 33}, "window_kv_channels 33, of which 33 are rotated"),
    (WINDOWS | {"window_kv_channels": 33, "position_embedding_type": "none"}, ""),
    (WINDOWS | {"window_num_attention_heads": 8}, ""),
    (WINDOWS | {"window_num_attention_heads": 6}, "6 query heads of layers with a window cannot"),
    (WINDOWS | {"window_num_attention_heads": 6, "window_query_groups": 3}, ""),
    (WINDOWS | {"window_num_attention_heads": 8, "fp8_format": "e4m3"}, "fp8 with window_num"),
    (WINDOWS | {"window_rotary_percent": 0.5}, ""),
    (WINDOWS | {"window_rotary_percent": 1.5}, "window_rotary_percent 1.5 of 64 channels"),
    (WINDOWS | {"window_rotary_percent": 0.02}, "window_rotary_percent 0.02 of 64 channels"),
    (WINDOWS | {"window_rotary_percent": 0.04}, ""),
    (WINDOWS | KEYS, ""),
    (WINDOWS | KEYS | {"window_attn_skip_freq": "0"}, "every layer has a window"),
    (KEYS | {"value_channels": 64}, ""),
    (KEYS | {"value_channels": 32}, "values that are keys have 64 channels"),
    ({"layer_input_size": 8}, ""),
    ({"layer_input_size": 8, "mtp_num_layers": 1}, "layer_input_size 8 with mtp_num_layers"),
    ({"layer_input_size": 8, "activation": "xielu"}, "layer_input_size 8 with activation xielu"),
    ({"layer_input_size": 8, "hybrid_layer_pattern": "*-*-"}, "layer_input_size 8 with hybrid"),
    ({"layer_scale": True}, ""),
    ({"layer_scale": True, "hybrid_layer_pattern": "*-*-"}, "layer_scale with"),
]


@pytest.mark.parametrize("settings, part", CASES)
def test_settings_are_allowed_or_refused(settings: dict[str, Any], part: str) -> None:
    found = messages_of("model", settings)
    if part:
        assert len(found) == 1 and part in found[0]
    else:
        assert found == []
