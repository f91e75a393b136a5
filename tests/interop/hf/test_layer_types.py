"""config.json of hybrid families: the kinds of layers in old and new entries, refused entries."""

from dataclasses import replace
from typing import Any

import pytest
import transformers

from nanotrain.config.model import ModelConfig
from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.canonical import canonical
from nanotrain.interop.hf.families import config_from_hf, config_to_hf, family_of
from tests.interop.hf.reference import GRANITE, HYBRID, LFM2_MOE, LLAMA_SHAPE, NEMOTRON_H

MODELS: dict[str, dict[str, Any]] = {
    "nemotron_h": NEMOTRON_H | {"hybrid_override_pattern": "ME*-"},
    "granitemoehybrid": LLAMA_SHAPE | GRANITE | {"num_hidden_layers": 3, "layer_types": HYBRID, "mamba_expand": 2},
    "lfm2": LLAMA_SHAPE | {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": LLAMA_SHAPE | LFM2_MOE,
}


def read(family: str, **change: Any) -> ModelConfig:
    return config_from_hf({"model_type": family, **MODELS[family], **change})


def test_layers_have_the_names_of_every_version() -> None:
    kinds = ["linear_attention", "moe", "full_attention", "mlp"]
    old = ["mamba", "moe", "attention", "mlp"]
    expected = read("nemotron_h")
    assert expected.hybrid_layer_pattern == "ME*-" and expected.num_layers == 4
    for entry in ({"layers_block_type": kinds}, {"layers_block_type": old}, {"layer_types": kinds}):
        assert read("nemotron_h", hybrid_override_pattern="M", **entry) == expected
    assert read("granitemoehybrid", layer_types=["mamba", "attention", "mamba"]) == read("granitemoehybrid")
    assert read("granitemoehybrid", layer_types=None).mixers == ("mamba2",) * 3
    assert read("lfm2", layer_types=None, full_attn_idxs=[1]) == read("lfm2")
    assert read("lfm2", layer_types=None).linear_attention_type is None


def test_borders_of_pipeline_stages_are_no_property_of_a_checkpoint() -> None:
    model = read("nemotron_h")
    staged = replace(model, hybrid_layer_pattern="ME|*-")
    assert canonical(staged) == canonical(model)
    assert config_to_hf(staged, family=family_of(staged))["hybrid_override_pattern"] == "ME*-"


def test_experts_that_no_layer_has_are_left_out() -> None:
    assert read("nemotron_h", hybrid_override_pattern="M*-").moe is None
    dense = read("granitemoehybrid", num_local_experts=0)
    assert dense.moe is None and dense.ffn_hidden_size == GRANITE["shared_intermediate_size"]


@pytest.mark.parametrize("change", [{}, {"block_ffn_dim_multiplier": 1.3, "block_multiple_of": 16}])
def test_the_width_of_an_mlp_of_lfm2_is_that_of_transformers(change: dict[str, Any]) -> None:
    adjusted = {"intermediate_size": 1000, **change}
    config = transformers.Lfm2Config(**MODELS["lfm2"] | adjusted)
    mlp = transformers.Lfm2ForCausalLM(config).model.layers[0].feed_forward
    assert read("lfm2", **adjusted).ffn_hidden_size == mlp.w1.out_features
    old = {key: value for key, value in MODELS["lfm2"].items() if key != "intermediate_size"}
    raw = {"model_type": "lfm2", **old, **change, "block_ff_dim": 1000, "tie_embedding": False}
    assert config_from_hf(raw) == read("lfm2", **adjusted, tie_word_embeddings=False)


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("nemotron_h", {"hybrid_override_pattern": "M*x"}, "hybrid_override_pattern: 'x'"),
        ("nemotron_h", {"layers_block_type": ["conv"]}, "layer_types: 'conv'"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ("nemotron_h", {"use_conv_bias": False}, "use_conv_bias"),
        ("nemotron_h", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("nemotron_h", {"num_experts_per_tok": 6}, "two per group"),
        ("granitemoehybrid", {"attention_bias": True}, "attention_bias"),
        ("granitemoehybrid", {"mamba_d_head": 5}, "mamba_d_head: 5.*only 8"),
        ("granitemoehybrid", {"time_step_limit": [0.0, 9.0]}, "time_step_limit"),
        ("granitemoehybrid", {"layer_types": ["conv"] * 3}, "layer_types: 'conv'"),
        ("granitemoehybrid", {"layer_types": HYBRID[:2]}, "of 2 layers"),
        ("lfm2", {"conv_bias": True}, "conv_bias"),
        ("lfm2_moe", {"num_dense_layers": 3}, "num_dense_layers: 3"),
    ],
)
def test_features_we_lack_are_refused_by_name(family: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(HuggingFaceError, match=named):
        read(family, **change)
