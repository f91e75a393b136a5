"""config.json of hybrid families: the kinds of layers in old and new entries, refused entries."""

import json
from dataclasses import replace
from typing import Any

import pytest
import transformers

from nanotrain.config.load import load
from nanotrain.config.model import ModelConfig
from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.canonical import canonical
from nanotrain.interop.hf.families import config_from_hf, config_to_hf, family_of
from tests.interop.hf.configs import LLAMA_SHAPE
from tests.interop.hf.hybrid_shapes import FALCON_H1, GRANITE, HYBRID, LFM2_MOE, NEMOTRON_H

MODELS: dict[str, dict[str, Any]] = {
    "nemotron_h": NEMOTRON_H | {"hybrid_override_pattern": "ME*-"},
    "granitemoehybrid": LLAMA_SHAPE
    | GRANITE
    | {"num_hidden_layers": 3, "layer_types": HYBRID, "mamba_expand": 2},
    "falcon_h1": LLAMA_SHAPE | FALCON_H1,
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
    assert read("granitemoehybrid", layer_types=["mamba", "attention", "mamba"]) == read(
        "granitemoehybrid"
    )
    assert read("granitemoehybrid", layer_types=None).mixers == ("mamba2",) * 3
    assert read("lfm2", layer_types=None, full_attn_idxs=[1]) == read("lfm2")
    assert read("lfm2", layer_types=None).linear_attention_type is None


def test_the_published_layout_of_nemotron_3_nano_is_that_of_its_recipe() -> None:
    """The config.json of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B, as published, without what only its
    own code reads.
    """
    raw = json.loads("""{"architectures": ["NemotronHForCausalLM"], "attention_bias": false, "chunk_size": 128,
        "conv_kernel": 4, "expand": 2, "head_dim": 128, "hidden_size": 2688, "initializer_range": 0.02,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "intermediate_size": 1856,
        "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_num_heads": 64,
        "mamba_proj_bias": false, "max_position_embeddings": 262144, "mlp_bias": false, "mlp_hidden_act": "relu2",
        "model_type": "nemotron_h", "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
        "n_group": 1, "n_groups": 8, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": true,
        "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 52, "num_key_value_heads": 2,
        "partial_rotary_factor": 1.0, "rescale_prenorm_residual": true, "residual_in_fp32": false,
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "sliding_window": null, "ssm_state_size": 128,
        "tie_word_embeddings": false, "time_step_floor": 0.0001, "time_step_limit": [0.0, Infinity],
        "time_step_max": 0.1, "time_step_min": 0.001, "topk_group": 1, "use_bias": false, "use_conv_bias": true,
        "vocab_size": 131072}""")
    recipe = load(["+config=nemotron3_nano_30b_a3b"], to_train=False).config.model
    assert canonical(config_from_hf(raw)) == canonical(
        replace(recipe, moe=replace(recipe.moe, aux_loss_coeff=[0.0]))
    )


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
        ("falcon_h1", {"mamba_rms_norm": True}, "mamba_norm_before_gate"),
        ("falcon_h1", {"projectors_bias": True}, "projectors_bias"),
        ("falcon_h1", {"mamba_d_ssm": 49}, "mamba_d_head"),
        ("lfm2", {"conv_bias": True}, "conv_bias"),
        ("lfm2_moe", {"num_dense_layers": 3}, "num_dense_layers: 3"),
    ],
)
def test_features_we_lack_are_refused_by_name(
    family: str, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(HuggingFaceError, match=named):
        read(family, **change)


def test_heads_of_kda_in_ling_have_the_width_of_the_published_entry() -> None:
    """transformers overwrites it by the rotary channels of MLA, and keeps it under another name."""
    published = {"model_type": "bailing_hybrid", "head_dim": 64, "qk_rope_head_dim": 32}
    model = config_from_hf(published)
    linear = model.linear_attention
    assert linear is not None and (linear.key_head_dim, linear.value_head_dim) == (64, 64)
    assert linear.num_key_heads == model.num_attention_heads == 32
    assert model.mixers[:6] == ("kda",) * 5 + ("mla",) and linear.decay_bound == 5.0
    assert model.mtp.num_layers is None
    written = config_to_hf(model, family="bailing_hybrid")
    assert (written["head_dim"], written["kda_lower_bound"]) == (64, -5.0)
    assert canonical(config_from_hf(written)) == canonical(model)
