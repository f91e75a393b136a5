"""config.json of Llama, Qwen2 and Qwen3: rotary positions, biases, attention windows."""

from typing import Any

import pytest

from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.families import config_from_hf
from nanotrain.interop.hf.llama import read_llama, read_qwen2, read_qwen3, write_llama, write_qwen2, write_qwen3
from tests.interop.hf.reference import LLAMA3_ROPE, LLAMA_SHAPE

LLAMA_JSON = LLAMA_SHAPE | {"model_type": "llama"}
SCALING = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": LLAMA3_ROPE},
        {"rope_theta": 500000.0, "rope_scaling": SCALING},
        {"rope_theta": 500000.0, "rope_scaling": {"type": SCALING["rope_type"]} | SCALING},
    ],
)
def test_rotary_positions_are_read_in_the_old_and_the_new_layout(rope: dict[str, Any]) -> None:
    model = config_from_hf(LLAMA_JSON | rope)
    assert (model.rotary_base, model.use_rope_scaling, model.rope_scaling_factor) == (500000.0, True, 4.0)
    assert (model.rope_low_freq_factor, model.rope_high_freq_factor) == (1.0, 4.0)
    assert model.rope_original_max_positions == 16


def test_the_old_layout_without_scaling() -> None:
    model = config_from_hf(LLAMA_JSON | {"rope_theta": 1e6, "rope_scaling": None})
    assert (model.rotary_base, model.use_rope_scaling) == (1e6, False)


def test_the_families_differ_in_biases_and_head_norms() -> None:
    llama, qwen2, qwen3 = (read({"vocab_size": 99}) for read in (read_llama, read_qwen2, read_qwen3))
    assert (llama.add_qkv_bias, qwen2.add_qkv_bias, qwen3.add_qkv_bias) == (False, True, False)
    assert (llama.qk_layernorm, qwen2.qk_layernorm, qwen3.qk_layernorm) == (False, False, True)
    assert read_llama({"attention_bias": True, "mlp_bias": True}).add_bias_linear
    for read, write, model in (
        (read_llama, write_llama, llama),
        (read_qwen2, write_qwen2, qwen2),
        (read_qwen3, write_qwen3, qwen3),
    ):
        assert read(write(model)) == model


def test_the_families_differ_in_what_they_may_leave_out() -> None:
    llama, qwen2, qwen3 = (read({}) for read in (read_llama, read_qwen2, read_qwen3))
    assert (llama.ffn_hidden_size, llama.vocab_size) == (11008, 32000)
    for qwen in (qwen2, qwen3):
        assert (qwen.ffn_hidden_size, qwen.vocab_size) == (22016, 151936)


def test_a_window_no_layer_uses_is_no_window() -> None:
    unused = {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2, "sliding_window": 8}
    assert config_from_hf(LLAMA_JSON | unused).add_qkv_bias
    assert config_from_hf(LLAMA_JSON | {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 8})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_act": "relu"}, "hidden_act: 'relu'"),
        ({"attention_bias": True}, "attention_bias: True"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type: 'longrope'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor of its yarn rotary scaling: None"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 2.0}}, "attention_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}, "use_sliding_window"),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
    ],
)
def test_an_unsupported_feature_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(HuggingFaceError, match=named):
        config_from_hf(LLAMA_JSON | change)
