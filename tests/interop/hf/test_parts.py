"""config.json of every family: entries beyond the tables, defaults of transformers, refused
features.
"""

from typing import Any

import pytest

from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.canonical import canonical
from nanotrain.interop.hf.families import config_from_hf, config_to_hf, family_of
from nanotrain.spec.shape import ModelShape
from tests.interop.hf.configs import LLAMA3_ROPE, LLAMA_SHAPE

LLAMA_JSON = LLAMA_SHAPE | {"model_type": "llama"}
NAMES = "llama", "qwen2", "qwen3"
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
    assert (model.rotary_base, model.use_rope_scaling, model.rope_scaling_factor) == (
        500000.0,
        True,
        4.0,
    )
    assert (model.rope_low_freq_factor, model.rope_high_freq_factor) == (1.0, 4.0)
    assert model.rope_original_max_positions == 16


def test_the_old_layout_without_scaling() -> None:
    model = config_from_hf(LLAMA_JSON | {"rope_theta": 1e6, "rope_scaling": None})
    assert (model.rotary_base, model.use_rope_scaling) == (1e6, False)


def test_the_families_differ_in_biases_and_head_norms() -> None:
    llama, qwen2, qwen3 = models = [
        config_from_hf({"model_type": name, "vocab_size": 99}) for name in NAMES
    ]
    assert (llama.add_qkv_bias, qwen2.add_qkv_bias, qwen3.add_qkv_bias) == (False, True, False)
    assert (llama.qk_layernorm, qwen2.qk_layernorm, qwen3.qk_layernorm) == (False, False, True)
    assert config_from_hf(
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True}
    ).add_bias_linear
    for name, model in zip(NAMES, models, strict=True):
        assert canonical(config_from_hf(config_to_hf(model, family=name))) == canonical(model), name


def test_the_families_differ_in_what_they_may_leave_out() -> None:
    llama, *qwens = (config_from_hf({"model_type": name}) for name in NAMES)
    assert (llama.ffn_hidden_size, llama.vocab_size) == (11008, 32000)
    for qwen in qwens:
        assert (qwen.ffn_hidden_size, qwen.vocab_size) == (22016, 151936)


def test_a_window_no_layer_uses_is_no_window() -> None:
    unused = {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "max_window_layers": 2,
        "sliding_window": 8,
    }
    assert config_from_hf(LLAMA_JSON | unused).add_qkv_bias
    assert config_from_hf(
        LLAMA_JSON | {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 8}
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_act": "relu"}, "hidden_act: 'relu'"),
        ({"attention_bias": True}, "attention_bias: True"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type: 'longrope'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor of its yarn rotary scaling: None"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 2.0}},
            "attention_factor",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1},
            "use_sliding_window",
        ),
        (
            {"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]},
            "sliding_attention",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
    ],
)
def test_an_unsupported_feature_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(HuggingFaceError, match=named):
        config_from_hf(LLAMA_JSON | change)


MISTRAL = LLAMA_SHAPE | {"model_type": "mistral", "sliding_window": None}
PHI3 = LLAMA_SHAPE | {"model_type": "phi3"}


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (
            PHI3 | {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            "short_factor of its longrope rotary scaling: None",
        ),
        (PHI3 | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type: 'yarn'"),
    ],
)
def test_what_would_compute_something_else_is_refused(raw: dict[str, Any], named: str) -> None:
    with pytest.raises(HuggingFaceError, match=named):
        config_from_hf(raw)


def test_a_model_comes_back_equal_and_partial_rotation_is_a_phi3() -> None:
    mistral, phi3 = config_from_hf(MISTRAL), config_from_hf(PHI3 | {"partial_rotary_factor": 0.5})
    assert canonical(config_from_hf(config_to_hf(mistral, family="mistral"))) == canonical(mistral)
    assert canonical(config_from_hf(config_to_hf(phi3, family="phi3"))) == canonical(phi3)
    assert (phi3.rotary_percent, family_of(phi3), family_of(mistral, name="mistral")) == (
        0.5,
        "phi3",
        "mistral",
    )


YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000,
}


def test_layers_with_a_window_keep_unscaled_positions() -> None:
    model = config_from_hf({"model_type": "olmo3", "num_hidden_layers": 8, "rope_scaling": YARN})
    assert (model.position_embedding_type, model.rotary_base_local) == ("yarn", 500000)
    assert model.window_layers == (True, True, True, False) * 2


@pytest.mark.parametrize("kind", ["olmo2", "olmo3"])
def test_biases_are_refused(kind: str) -> None:
    with pytest.raises(HuggingFaceError, match="attention_bias"):
        config_from_hf({"model_type": kind, "attention_bias": True})


# Entries of google/gemma-3-1b-pt that matter here.
ONE_B = {
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "rope_local_base_freq": 10000,
    "rope_theta": 1000000,
}


def test_the_older_format_of_windows_and_rotary_bases() -> None:
    model = config_from_hf(ONE_B)
    assert (model.rotary_base, model.rotary_base_local, model.window_size) == (1e6, 1e4, 511)
    assert model.window_layers[:7] == (True,) * 5 + (False, True)
    assert model.softmax_scale is None and not model.untie_embeddings_and_output_weights


def test_a_scale_of_the_scores_other_than_the_heads_is_kept() -> None:
    model = config_from_hf(ONE_B | {"head_dim": 128, "query_pre_attn_scalar": 168})
    assert (
        model.softmax_scale == 168**-0.5
        and config_to_hf(model, family="gemma3_text")["query_pre_attn_scalar"] == 168
    )


@pytest.mark.parametrize(
    "entry",
    [
        {"attention_bias": True},
        {"hidden_activation": "silu"},
        {"layer_types": ["linear_attention"]},
    ],
)
def test_what_the_model_lacks_is_refused(entry: dict[str, object]) -> None:
    with pytest.raises(HuggingFaceError, match=next(iter(entry))):
        config_from_hf(ONE_B | entry)


def test_the_defaults_are_those_of_the_larger_model() -> None:
    model = config_from_hf({"model_type": "gpt_oss"})
    assert (model.num_layers, model.moe.num_experts, model.moe.router_topk, model.rotary_base) == (
        36,
        128,
        4,
        150000,
    )
    assert model.window_layers[:3] == (True, False, True) and model.window_size == 127
    assert (model.yarn.rotary_scaling_factor, model.yarn.correction_range_round_to_int) == (
        32,
        False,
    )
    assert (model.activation_func_clamp_value, model.glu_linear_offset) == (7, 1)


@pytest.mark.parametrize("entry", [{"attention_bias": False}, {"swiglu_alpha": 1.0}])
def test_what_differs_from_gpt_oss_is_refused(entry: dict[str, object]) -> None:
    with pytest.raises(HuggingFaceError, match=next(iter(entry))):
        config_from_hf({"model_type": "gpt_oss"} | entry)


def test_missing_entries_have_the_values_of_gpt2_small() -> None:
    model = config_from_hf({"model_type": "gpt2"})
    assert (model.num_layers, model.hidden_size, model.num_attention_heads, model.vocab_size) == (
        12,
        768,
        12,
        50257,
    )
    assert (ModelShape.of(model).ffn_size, model.max_position_embeddings) == (3072, 1024)
    assert model.activation == "gelu_tanh" and model.add_bias_linear


@pytest.mark.parametrize(
    ("name", "written"), [("gelu", "gelu"), ("gelu_new", "gelu_new"), ("gelu_fast", "gelu_new")]
)
def test_activations_that_compute_the_same_are_written_as_one(name: str, written: str) -> None:
    model = config_from_hf(
        {"model_type": "gpt2", "activation_function": name, "n_inner": 100, "n_positions": 64}
    )
    assert (model.ffn_hidden_size, model.max_position_embeddings) == (100, 64)
    entries = config_to_hf(model, family="gpt2")
    assert entries["activation_function"] == written and config_from_hf(entries) == model


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2", "activation_function": "tanh"}, "activation_function"),
        (
            {"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx",
        ),
        ({"model_type": "gpt2", "scale_attn_weights": False}, "scale_attn_weights"),
    ],
)
def test_what_differs_from_gpt2_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(HuggingFaceError, match=named):
        config_from_hf(change)
