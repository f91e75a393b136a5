"""The entries of config.json that published models have and those that they leave out, and what is
refused of them.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.canonical import canonical
from nanotrain.interop.hf.families import FAMILIES, config_from_hf
from nanotrain.model.rope import inverse_frequencies
from tests.interop.hf.configs import CONFIGS
from tests.interop.hf.reference import load
from tests.model.building import random_batch

DOTS = {
    "model_type": "dots1",
    "norm_topk_prob": True,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}


# incomplete, or unknown to transformers
NO_DEFAULTS = {"cohere_compass_text", "deepseek_v2", "dots1", "kimi_k2"}


@pytest.mark.parametrize("kind", sorted(FAMILIES.keys() - NO_DEFAULTS))
def test_entries_that_are_left_out_have_the_values_of_transformers(kind: str) -> None:
    ours = canonical(config_from_hf({"model_type": kind}))
    theirs = canonical(config_from_hf(transformers.AutoConfig.for_model(kind).to_dict()))
    assert replace(theirs, mtp=ours.mtp) == ours  # transformers counts layers that it does not have


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"model_type": "seed_oss", "attention_out_bias": True}, "attention_out_bias"),
        ({"model_type": "arcee", "hidden_act": "silu"}, "hidden_act"),
        ({"model_type": "dots1"}, "norm_topk_prob: False"),
        (DOTS | {"max_window_layers": 2}, "use_sliding_window"),
        ({"model_type": "minimax_m2", "scoring_func": "softmax"}, "scoring_func"),
        ({"model_type": "minimax_m2", "use_routing_bias": False}, "use_routing_bias"),
        ({"model_type": "solar_open", "first_k_dense_replace": 1}, "first_k_dense_replace"),
        (
            {"model_type": "exaone_moe", "layer_types": ["full_attention"]},
            "layer_types: 'of 1 layer'",
        ),
        ({"model_type": "mistral4", "n_group": 2}, "n_group"),
        (
            {"model_type": "ministral3", "rope_parameters": {"rope_type": "default"}},
            "rope_type.*only yarn",
        ),
        (
            {"model_type": "llama", "rope_parameters": {"llama_4_scaling_beta": 0.1}},
            "llama_4_scaling_beta",
        ),
        ({"model_type": "ernie4_5", "use_bias": True}, "use_bias"),
        ({"model_type": "ernie4_5_moe", "moe_layer_start_index": 28}, "moe_layer_start_index"),
        ({"model_type": "granitemoe", "attention_bias": True}, "attention_bias"),
        (
            {"model_type": "glm_moe_dsa", "indexer_types": ["shared", "full"] * 39},
            "indexer_types of layer 0",
        ),
        ({"model_type": "deepseek_v32", "mlp_layer_types": ["sparse"] * 61}, "mlp_layer_types"),
        ({"model_type": "gemma3n_text"}, "it would need streams that are predicted and corrected"),
        ({"model_type": "qwen3_mo"}, "nearest names are qwen3_moe"),
        ({"model_type": "deepseek_v2", "topk_method": "group_limited_greedy"}, "topk_method"),
        ({"model_type": "ernie4_5_moe", "routed_scaling_factor": 2.0}, "routed_scaling_factor"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv"),
        ({"model_type": "hunyuan_v1_moe", "moe_topk": [1, 2]}, "moe_topk"),
        (
            {"model_type": "hunyuan_v1_dense", "rope_parameters": {"rope_type": "dynamic"}},
            "rope_type",
        ),
        ({"model_type": "cwm", "layer_types": ["chunked_attention"] * 64}, "chunked_attention"),
    ],
)
def test_what_would_compute_something_else_is_refused(entries: dict[str, Any], named: str) -> None:
    with pytest.raises(HuggingFaceError, match=named):
        config_from_hf(entries)


def test_rotary_positions_follow_the_windows_of_exaone() -> None:
    entries = {
        "model_type": "exaone_moe",
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "hidden_size": 32,
    }
    assert config_from_hf(entries).no_rope_layers == (False, False, False, True)


def test_the_rotated_channels_of_minimax_may_be_a_number() -> None:
    assert config_from_hf({"model_type": "minimax_m2", "rotary_dim": 64}).rotary_percent == 0.5


VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


def test_of_a_ministral_that_sees_images_the_text_model_is_read(tmp_path: Path) -> None:
    text, vision = (
        CONFIGS["ministral3"][1] | {"model_type": "ministral3"},
        VISION | {"model_type": "pixtral"},
    )
    config = transformers.Mistral3Config(
        text_config=text, vision_config=vision, tie_word_embeddings=False
    )
    theirs = transformers.Mistral3ForConditionalGeneration(config)
    theirs.save_pretrained(tmp_path)
    tokens = random_batch().tokens
    torch.testing.assert_close(
        load(tmp_path).logits(tokens), theirs(tokens).logits, rtol=0, atol=1e-5
    )


def test_of_a_llama4_that_sees_images_the_text_model_is_read(tmp_path: Path) -> None:
    text, vision = (
        CONFIGS["llama4"][1],
        VISION | {"image_size": 8, "patch_size": 4, "vision_output_dim": 8},
    )
    config = transformers.Llama4Config(
        text_config=text, vision_config=vision | {"projector_output_dim": 8}
    )
    theirs = transformers.Llama4ForConditionalGeneration(config)
    theirs.save_pretrained(tmp_path)
    tokens = random_batch().tokens
    expected = theirs.language_model(tokens).logits  # the whole model fails in transformers 5.24
    torch.testing.assert_close(load(tmp_path).logits(tokens), expected, rtol=0, atol=1e-5)


def test_llama4_scout_is_read_as_published() -> None:
    rope = {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
    entries = {
        "model_type": "llama4_text",
        "attn_temperature_tuning": True,
        "max_position_embeddings": 10485760,
        "moe_layers": None,
        "no_rope_layers": [],
        "rope_scaling": rope | {"original_max_position_embeddings": 8192},
    }
    model_config = config_from_hf(entries)
    assert model_config.no_rope_layers == (False, False, False, True) * 12
    assert model_config.window_layers == (True, True, True, False) * 12
    assert (
        model_config.attention_chunk_size,
        model_config.attn_scale,
        model_config.floor_scale,
    ) == (8192, 0.1, 8192)
    assert all(model_config.moe_layers) and model_config.moe.shared_expert_intermediate_size == 8192
    assert inverse_frequencies(model_config).isfinite().all()
    maverick = {
        "interleave_moe_layer_step": 2,
        "num_local_experts": 128,
        "use_qk_norm": False,
        "rope_scaling": None,
    }
    assert config_from_hf(entries | maverick).moe_layers == (False, True) * 24


def test_of_kimi_k25_the_text_model_is_read(tmp_path: Path) -> None:
    text = CONFIGS["deepseek_v3"][1] | {"model_type": "kimi_k2"}
    vision = VISION | {"pos_emb_height": 4, "pos_emb_width": 4}
    config = transformers.Kimi_K25Config(
        text_config=text, vision_config=vision, tie_word_embeddings=False
    )
    theirs = transformers.Kimi_K25ForConditionalGeneration(config)
    theirs.save_pretrained(tmp_path)
    # where transformers renames the layers of the text model too
    file = tmp_path / "model.safetensors"
    save_file(
        {
            name.replace("model.blocks", "model.layers"): each
            for name, each in load_file(file).items()
        },
        file,
    )
    tokens = random_batch().tokens
    torch.testing.assert_close(
        load(tmp_path).logits(tokens), theirs(tokens).logits, rtol=0, atol=1e-5
    )
