"""Families with the entries of Llama: what they have besides, and what is refused by name."""

from dataclasses import replace
from typing import Any

import pytest
import transformers

from nanotrain.config.model import ModelConfig
from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.families import FAMILIES, config_from_hf, config_to_hf, family_of
from tests.interop.hf.configs import CONFIGS
from tests.interop.hf.llama_like import ARCHITECTURES, LLAMA_LIKE


def read(name: str, **changes: Any) -> ModelConfig:
    family, fields = CONFIGS[name]
    config_class = getattr(transformers, f"{family}Config")
    return config_from_hf(
        config_class(**fields).to_dict() | {"model_type": config_class.model_type} | changes
    )


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("internlm3", {"mlp_bias": False}, "attention_bias: True"),
        ("iquestcoder", {"clip_qkv": 8.0}, "clip_qkv"),
        ("sarvam_moe", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers: 1"),
        ("helium", {"mlp_bias": True}, "mlp_bias"),
        ("starcoder2", {"hidden_act": "relu"}, "hidden_act"),
        ("nemotron", {"mlp_bias": True}, "mlp_bias"),
        ("jais2", {"hidden_act": "silu"}, "hidden_act"),
        ("youtu", {"rope_interleave": False}, "rope_interleave"),
        ("youtu", {"pad_token_id": 2}, "pad_token_id: 2"),
        ("lara_mini", {"layer_types": ["linear_attention"] * 4}, "sliding_attention in some layer"),
        ("lara_mini", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ("lara_mini", {"attention_bias": True}, "attention_bias"),
        ("mamba2", {"use_bias": True}, "use_bias"),
        ("mamba2", {"time_step_limit": [0.0, 9.0]}, "time_step_limit"),
        ("hyperclovax", {"mlp_bias": True}, "mlp_bias"),
        ("lfm3", {"attention_bias": True}, "attention_bias"),
        ("lfm3", {"conv_bias": True}, "conv_bias"),
        ("granite_swa", {"layer_rope_theta": [1e4, 5e4, 100.0]}, "one base for all layers of a"),
        (
            "granite_swa-bases",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "layer_rope_theta",
        ),
        ("hy_v3", {"attention_bias": True}, "attention_bias"),
        ("afmoe", {"attention_bias": True}, "attention_bias"),
        ("flint", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("bamba", {"mamba_proj_bias": True}, "mamba_proj_bias"),
        ("persimmon", {"hidden_act": "gelu"}, "hidden_act"),
        ("gpt_bigcode", {"multi_query": False}, "multi_query"),
        ("gpt_bigcode", {"activation_function": "silu"}, "activation_function"),
        ("aria_text", {"mlp_bias": True}, "mlp_bias"),
        ("apertus1p5_text", {"output_vocab_size": 100}, "output_vocab_size: 100"),
        ("gpt_neo", {"attention_layers": ["global", "sparse"]}, "layer_types"),
        ("opt", {"word_embed_proj_dim": 16}, "word_embed_proj_dim: 16"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
        ("biogpt", {"hidden_act": "silu"}, "activation_function"),
        ("axk1", {"attention_bias": True}, "attention_bias"),
        ("cohere2_moe", {"sliding_window": None}, "sliding_window"),
        ("cohere2_moe-sigmoid", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("codegen", {"rotary_dim": 0}, "rotary_dim"),
        ("minicpm3", {"mlp_bias": True}, "mlp_bias"),
        ("bailing_hybrid", {"attention_bias": True}, "attention_bias"),
        ("bailing_hybrid", {"moe_renormalize": False}, "moe_renormalize"),
        ("bailing_hybrid", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("bailing_hybrid", {"kda_lower_bound": 2.0}, "decay_bound"),
        (
            "cohere_compass_text",
            {"rope_parameters": {"full_attention": None}},
            "sliding_attention in rope_parameters",
        ),
    ],
)
def test_features_we_lack_are_refused_by_name(
    name: str, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(HuggingFaceError, match=named):
        read(name, **change)


def test_a_class_of_another_family_is_named_by_its_own_files() -> None:
    """For vLLM and others, which know the published names of classes alone."""
    for family in ARCHITECTURES.keys() - {"GPT2", "CohereCompassText"}:
        name = next(name for name, (other, _) in LLAMA_LIKE.items() if other == family)
        assert FAMILIES[name].architecture == f"{family}ForCausalLM"


@pytest.mark.parametrize(
    ("bases", "expected"),
    [
        (None, (10000.0, None, (False,) * 3)),
        ([1e4] * 3, (1e4, None, (False,) * 3)),
        ([0, 100.0, 100.0], (100.0, None, (True, False, False))),
        ([5e5, 100.0, 0], (5e5, 100.0, (False, False, True))),
    ],
)
def test_rotary_bases_of_granite_are_those_of_kinds_of_layers(
    bases: list[float] | None, expected: tuple[float, float | None, tuple[bool, ...]]
) -> None:
    model = read("granite_swa", layer_rope_theta=bases)
    found = (model.rotary_base, model.rotary_base_local, model.no_rope_layers)
    assert found == expected
    written = config_to_hf(model, family=family_of(model))
    assert written["layer_rope_theta"] == [float(base) for base in bases or [1e4] * 3]


def test_a_granite_without_any_base_has_no_positions() -> None:
    model = read("granite_swa", layer_rope_theta=[0, 0, 0])
    assert model.position_embedding_type == "none"
    assert config_to_hf(model, family="granite_swa")["layer_rope_theta"] == [0.0] * 3


def test_a_bamba_of_attention_alone_needs_no_sizes_of_mamba() -> None:
    model = read("bamba", attn_layer_indices=[0, 1, 2])
    assert model.linear_attention_type is None and model.rotary_percent == 0.5
    written = config_to_hf(model, family="bamba")
    assert written["attn_layer_indices"] == [0, 1, 2]
    assert written["mamba_n_heads"] * written["mamba_d_head"] == model.hidden_size


def test_a_bamba_rotates_half_of_the_channels_whatever_its_entry_says() -> None:
    model = read("bamba", partial_rotary_factor=0.25)
    assert model.rotary_percent == 0.5
    with pytest.raises(HuggingFaceError, match="bamba cannot represent.*partial_rotary_factor"):
        family_of(replace(model, rotary_percent=0.25), name="bamba")


def test_a_factor_of_logits_of_hyperclova_multiplies_them() -> None:
    model = read("hyperclovax", logits_scaling=0.25)
    assert model.logits_scaling == 4.0
    unscaled = replace(model, softmax_scale=None, logits_scaling=1.0)
    written = config_to_hf(unscaled, family="hyperclovax")
    assert written["logits_scaling"] == 1.0
    assert written["attention_multiplier"] == model.head_dim**-0.5


def test_a_granite_without_a_shared_expert_is_written_with_a_width_of_0() -> None:
    model = read("granitemoeshared", shared_intermediate_size=0)
    assert model.moe is not None and model.moe.shared_expert_intermediate_size is None
    assert config_to_hf(model, family="granitemoeshared")["shared_intermediate_size"] == 0
