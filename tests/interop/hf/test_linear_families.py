"""Families with layers of linear attention: published entries of config.json, rejected ones, text
models of others.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanotrain.config.load import load as load_config
from nanotrain.config.model import MTPConfig
from nanotrain.errors import HuggingFaceError
from nanotrain.inference.checkpoint import export_checkpoint, load_stage, open_model
from nanotrain.inference.generate import Sampling, generate
from nanotrain.inference.score import log_likelihoods
from nanotrain.interop.hf.canonical import canonical
from nanotrain.interop.hf.export import export_weights
from nanotrain.interop.hf.families import config_from_hf, config_to_hf
from nanotrain.interop.hf.import_weights import import_hf, import_weights
from nanotrain.spec.boxes import TensorBox
from tests.interop.hf.configs import CONFIGS
from tests.interop.hf.reference import load, reference, tensors_of

IMAGES = {
    "vision_config": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
    },
    "image_token_id": 3,
    "video_token_id": 4,
    "vision_start_token_id": 5,
    "vision_end_token_id": 6,
}
KIMI = {  # with the entries of moonshotai/Kimi-Linear-48B-A3B-Instruct
    "model_type": "kimi_linear",
    "num_hidden_layers": 5,
    "num_experts": 16,
    "num_experts_per_token": 4,
    "num_expert_group": 1,
    "num_shared_experts": 2,
    "moe_intermediate_size": 32,
    "model_max_length": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 5],
        "kda_layers": [1, 2, 3],
        "head_dim": 16,
        "num_heads": 8,
        "short_conv_kernel_size": 3,
    },
}


QWEN = {  # what the three have in common
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": False,
}
EXPERTS = {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "router_aux_loss_coef": 0.001,
}
# entries of the published config.json, of their text models
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3_next_80b_a3b": QWEN
    | EXPERTS
    | {
        "model_type": "qwen3_next",
        "num_hidden_layers": 48,
        "num_experts": 512,
        "num_experts_per_tok": 10,
    }
    | {"norm_topk_prob": True, "vocab_size": 151936}
    | {
        "rope_parameters": None,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
    "qwen3_5_35b_a3b": QWEN
    | EXPERTS
    | {
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 40,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    }
    | {"mtp_num_hidden_layers": 1, "vocab_size": 248320},
    "qwen3_5_27b": QWEN
    | {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "intermediate_size": 17408,
    }
    | {
        "linear_num_value_heads": 48,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "vocab_size": 248320,
    },
    "kimi_linear_48b_a3b": {
        "model_type": "kimi_linear",
        "first_k_dense_replace": 1,
        "head_dim": 72,
        "hidden_act": "silu",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "kv_lora_rank": 512,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
            "head_dim": 128,
            "kda_layers": [layer for layer in range(1, 27) if layer % 4],
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        "mla_use_nope": True,
        "model_max_length": 1048576,
        "moe_intermediate_size": 1024,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": 32,
        "num_expert_group": 1,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_hidden_layers": 27,
        "num_key_value_heads": 32,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 2.446,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_grouped_topk": True,
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
}


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_a_recipe_is_the_published_model(recipe: str) -> None:
    model = load_config(["+config=" + recipe], to_train=False).config.model
    if model.moe is not None:
        model = replace(model, moe=replace(model.moe, aux_loss_coeff=[0.0]))
    # which recipes leave out
    published = replace(config_from_hf(PUBLISHED[recipe]), mtp=MTPConfig())
    assert canonical(published) == canonical(model)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_model_of_a_model_with_images_is_imported_and_exported_alone(
    name: str, tmp_path: Path
) -> None:
    family, fields = CONFIGS[name]
    config = getattr(transformers, f"{family}Config")(text_config=fields, **IMAGES)
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    theirs.save_pretrained(tmp_path / "in")
    tokens = torch.randint(7, fields["vocab_size"], (2, 20))
    torch.testing.assert_close(
        load(tmp_path / "in").logits(tokens), theirs(tokens).logits, rtol=0, atol=1e-5
    )

    import_hf(tmp_path / "in", tmp_path / "step-00000000")
    export_checkpoint(tmp_path / "step-00000000", tmp_path / "out")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(back).__name__ == f"{family}ForCausalLM"
    torch.testing.assert_close(back(tokens).logits, theirs(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear"]
)
def test_an_imported_model_generates_as_transformers_and_is_scored_by_it(
    name: str, tmp_path: Path
) -> None:
    theirs = reference(name)
    theirs.save_pretrained(tmp_path / "in")
    import_hf(tmp_path / "in", tmp_path / "step-00000000")
    stage = load_stage(open_model(tmp_path / "step-00000000"))
    prompt = torch.randint(3, 131, (1, 9), generator=torch.Generator().manual_seed(1))
    expected = theirs.generate(
        prompt, max_new_tokens=6, do_sample=False, eos_token_id=None, use_cache=False
    )[0, 9:]

    for use_cache in (True, False):
        sampling = Sampling(temperature=0.0)
        new = generate(
            stage, prompt[0].tolist(), num_tokens=6, sampling=sampling, use_cache=use_cache
        )
        assert new == expected.tolist()
    [scored] = log_likelihoods(stage, [(prompt[0].tolist(), new)], batch_size=1)
    log_probs = theirs(torch.cat([prompt[0], expected])[None]).logits[0, 8:-1].log_softmax(-1)
    assert scored.log_likelihood == pytest.approx(
        log_probs.gather(-1, expected[:, None]).sum().item(), rel=1e-4
    )
    assert scored.is_greedy


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe"])
def test_multi_token_prediction_comes_back_to_the_bit_or_is_left_out(
    name: str, tmp_path: Path
) -> None:
    theirs = reference(name)
    theirs.save_pretrained(tmp_path / "in")
    stored = load_file(tmp_path / "in" / "model.safetensors")
    last = {
        key.removeprefix("model.layers.3."): x
        for key, x in stored.items()
        if key.startswith("model.layers.3.")
    }
    drawn = {f"mtp.layers.0.{key}": torch.randn_like(x) for key, x in last.items()}
    drawn |= {
        f"mtp.{key}.weight": torch.randn(32)
        for key in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    }
    published = stored | drawn | {"mtp.fc.weight": torch.randn(32, 64)}
    save_file(published, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})

    stage = load(tmp_path / "in")
    [layer] = stage.mtp_layers
    assert torch.equal(layer.enorm.weight, published["mtp.pre_fc_norm_embedding.weight"])
    kind, tensors = theirs.config.model_type, tensors_of(stage).items()
    export_weights(tmp_path / "out", stage.model_config, tensors=tensors, family=kind)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == published.keys()
    assert all(torch.equal(written[key], x) for key, x in published.items())
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(back(torch.arange(9)[None]).logits, theirs(torch.arange(9)[None]).logits)

    without = replace(stage.model_config, mtp=MTPConfig())  # --mtp-num-layers 0
    key, norm = "final_norm.weight", torch.empty(32)
    import_weights(tmp_path / "in", without, wanted={TensorBox.full(key, (32,)): norm})
    assert torch.equal(norm, published["model.norm.weight"])


def test_published_entries_of_kimi_linear_come_back() -> None:
    model = config_from_hf(KIMI)
    assert model.mixers == ("kda", "kda", "kda", "mla", "mla")
    assert model.mlps == ("dense", "moe", "moe", "moe", "moe")
    linear, moe = model.linear_attention, model.moe
    assert (linear.num_key_heads, linear.value_head_dim, linear.conv_kernel_dim) == (8, 16, 3)
    assert (moe.num_experts, moe.router_topk, moe.shared_expert_intermediate_size) == (16, 4, 64)
    assert (model.max_position_embeddings, model.mla.compressed_norm_epsilon) == (512, 1e-6)
    written = config_to_hf(model, family="kimi_linear")
    assert written["linear_attn_config"] == KIMI["linear_attn_config"]
    assert config_from_hf(written) == model
    theirs = transformers.KimiLinearConfig(**written)
    assert theirs.layer_types == ["linear_attention"] * 3 + ["full_attention"] * 2
    assert (theirs.n_shared_experts, theirs.num_experts_per_tok, theirs.linear_num_heads) == (
        2,
        4,
        8,
    )


def test_every_interval_without_layer_types_has_full_attention() -> None:
    raw = {
        "model_type": "qwen3_next",
        "num_hidden_layers": 6,
        "num_experts": 4,
        "full_attention_interval": 3,
    }
    assert config_from_hf(raw).mixers == ("gated_delta_net", "gated_delta_net", "attention") * 2
    assert config_from_hf(raw).rotary_percent == 0.25


@pytest.mark.parametrize(
    "parameters", [{"rope_theta": None}, {"rope_type": None, "rope_theta": None}]
)
def test_olmo_hybrid_without_a_base_has_no_rotary_positions(parameters: dict[str, Any]) -> None:
    raw = {"model_type": "olmo_hybrid", "rope_parameters": parameters}
    assert config_from_hf(raw).position_embedding_type == "none"
    assert config_from_hf(raw | {"rope_parameters": {"rope_theta": 5e5}}).rotary_base == 5e5


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"model_type": "qwen3_next", "layer_types": ["full_attention"] * 48},
            "linear_attention in some layer",
        ),
        (
            {"model_type": "qwen3_next", "layer_types": ["linear_attention"] * 47},
            "layer_types: 'of 47 layers'",
        ),
        (
            {"model_type": "qwen3_next", "layer_types": ["sliding_attention"] * 48},
            "layer_types: 'sliding_attention'",
        ),
        ({"model_type": "qwen3_next", "attn_output_gate": False}, "attn_output_gate"),
        ({"model_type": "qwen3_next", "mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers"),
        ({"model_type": "qwen3_5_text", "attention_bias": True}, "attention_bias"),
        ({"model_type": "qwen3_5_moe_text", "norm_topk_prob": False}, "norm_topk_prob"),
        ({"model_type": "qwen3_5_moe_text", "mlp_only_layers": [0]}, "mlp_only_layers"),
        (
            {
                "model_type": "olmo_hybrid",
                "rope_parameters": {"rope_theta": 1e4, "rope_type": "longrope"},
            },
            "longrope",
        ),
        (KIMI | {"mla_use_nope": False}, "mla_use_nope"),
        (KIMI | {"routed_expert_hidden_size": 64}, "routed_expert_hidden_size"),
        (
            KIMI | {"linear_attn_config": KIMI["linear_attn_config"] | {"gate_lower_bound": -5.0}},
            "gate_lower_bound",
        ),
    ],
)
def test_features_we_lack_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(HuggingFaceError, match=named):
        config_from_hf(json.loads(json.dumps(change)))
