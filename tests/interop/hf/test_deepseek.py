"""DeepSeek-V3 and GLM-4-MoE: the published config.json, entries without a counterpart, fp8 weights,
later layers.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Glm4MoeForCausalLM

from nanotrain.config.load import load as load_config
from nanotrain.config.model import ModelConfig, MTPConfig
from nanotrain.errors import HuggingFaceError
from nanotrain.inference.checkpoint import export_checkpoint, load_stage, open_model
from nanotrain.interop.hf.canonical import canonical
from nanotrain.interop.hf.export import export_weights
from nanotrain.interop.hf.families import (
    check_against,
    config_from_hf,
    config_to_hf,
    family_of,
    model_from_hf,
)
from nanotrain.interop.hf.import_weights import import_hf
from nanotrain.model.transformer import Stage
from tests.interop.hf.configs import CONFIGS, LLAMA_SHAPE
from tests.interop.hf.reference import biases_of, load, reference, tensors_of

DEEPSEEK = LLAMA_SHAPE | CONFIGS["deepseek_v3"][1] | {"model_type": "deepseek_v3"}
GLM = LLAMA_SHAPE | CONFIGS["glm4_moe"][1] | {"model_type": "glm4_moe"}


def test_the_published_config_of_deepseek_v3_is_the_recipe() -> None:
    """deepseek-ai/DeepSeek-V3, as published; the recipe is its pretraining, before YaRN."""
    raw = json.loads("""{"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
        "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
        "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
        "weight_block_size": [128, 128]}, "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "beta_slow": 1,
        "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"},
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": false,
        "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": true, "v_head_dim": 128,
        "vocab_size": 129280}""")
    read = config_from_hf(raw)
    recipe = load_config(["+config=deepseek_v3"], to_train=False).config.model
    assert (
        read.yarn.rotary_scaling_factor,
        read.yarn.mscale_all_dim,
        read.max_position_embeddings,
    ) == (
        40.0,
        1.0,
        163840,
    )
    pretrained = config_from_hf(raw | {"rope_scaling": None, "max_position_embeddings": 4096})
    assert read.mtp.num_layers == 1
    free = {
        "init_method_std": recipe.init_method_std,
        "mtp": recipe.mtp,
        "moe": replace(pretrained.moe, aux_loss_coeff=[0.0001]),
    }
    assert canonical(replace(pretrained, **free)) == canonical(recipe)
    assert family_of(recipe) == "deepseek_v3"


@pytest.mark.parametrize(
    ("raw", "change", "named"),
    [
        (DEEPSEEK, {"attention_bias": True}, "attention_bias: True"),
        (DEEPSEEK, {"rope_interleave": False}, "rope_interleave: False"),
        (DEEPSEEK, {"num_key_value_heads": 2}, "num_key_value_heads: 2"),
        (DEEPSEEK, {"num_experts_per_tok": 6}, "num_experts_per_tok: 6"),
        (DEEPSEEK, {"first_k_dense_replace": 3}, "first_k_dense_replace: 3"),
        (GLM, {"norm_topk_prob": False}, "norm_topk_prob: False"),
    ],
)
def test_what_would_compute_something_else_is_refused(
    raw: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    with pytest.raises(HuggingFaceError, match=named):
        config_from_hf(raw | change)


def test_a_glm_comes_back_equal() -> None:
    model = config_from_hf(GLM)
    assert (model.rotary_percent, model.add_qkv_bias, model.moe.layer_freq) == (
        0.5,
        True,
        "[0]+[1]*2",
    )
    assert model.moe.shared_expert_intermediate_size == 48 and model.moe.router_num_groups is None
    assert canonical(config_from_hf(config_to_hf(model, family="glm4_moe"))) == canonical(model)


def quantize(folder: Path, *, block: int) -> dict[str, torch.Tensor]:
    """Rewrite the matrices of the attention and the experts as fp8 with a factor per block; returns
    what they mean.
    """
    tensors, meant = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if "proj" in name and name.endswith(".weight")]:
        rows, columns = (torch.arange(size) // block for size in tensors[name].shape)
        factors = torch.rand(int(rows[-1]) + 1, int(columns[-1]) + 1) + 0.5
        spread = factors[rows][:, columns]
        low = (tensors[name] / spread).to(torch.float8_e4m3fn)
        meant[name] = low.float() * spread
        tensors |= {name: low, f"{name}_scale_inv": factors}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [block, block]}
    (folder / "config.json").write_text(json.dumps(config))
    return meant


def test_fp8_weights_are_multiplied_by_their_block_factors(tmp_path: Path) -> None:
    theirs = reference("deepseek_v3")
    theirs.save_pretrained(tmp_path)
    plain = tensors_of(load(tmp_path))
    meant = quantize(tmp_path, block=5)  # divides no matrix
    actual = tensors_of(load(tmp_path))
    assert torch.equal(
        actual["layers.1.mlp.experts.up.weight"][3],
        meant["model.layers.1.mlp.experts.3.up_proj.weight"],
    )
    # compressed keys and values, then rotary channels
    rows = [*range(16), *range(16, 24, 2), *range(17, 24, 2)]
    assert torch.equal(
        actual["layers.0.attention.kv_down.weight"],
        meant["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"][rows],
    )
    assert torch.equal(
        actual["layers.0.attention_norm.weight"], plain["layers.0.attention_norm.weight"]
    )
    changed = [name for name in plain if not torch.equal(plain[name], actual[name])]
    assert changed and all((plain[name] - actual[name]).abs().max() < 0.1 for name in changed)


def test_another_quantization_is_refused(tmp_path: Path) -> None:
    reference("deepseek_v3").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {
        "quantization_config": {"quant_method": "awq"}
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(HuggingFaceError, match="quantization_config: 'awq'"):
        load(tmp_path)


def test_layers_beyond_the_model_are_ignored_and_a_missing_one_is_not(tmp_path: Path) -> None:
    reference("deepseek_v3").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        tensors | {"model.layers.3.mlp.up_proj.weight": torch.ones(2, 2)},
        tmp_path / "model.safetensors",
    )
    load(tmp_path)
    bias = "model.layers.2.mlp.gate.e_score_correction_bias"
    save_file(
        {name: tensor for name, tensor in tensors.items() if name != bias},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(HuggingFaceError, match=f"missing: {bias}"):
        load(tmp_path)


def with_mtp(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """A folder as published, with a layer of multi-token prediction that has copies of embedding
    and head.
    """
    reference(name).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    last, further, size = "model.layers.2.", "model.layers.3.", LLAMA_SHAPE["hidden_size"]
    layer = {
        further + key.removeprefix(last): torch.randn_like(t)
        for key, t in tensors.items()
        if key.startswith(last)
    }
    layer |= {
        f"{further}{norm}.weight": torch.randn(size)
        for norm in ("enorm", "hnorm", "shared_head.norm")
    }
    layer |= {f"{further}eh_proj.weight": torch.randn(size, 2 * size)}
    layer |= {f"{further}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone()}
    layer |= {f"{further}shared_head.head.weight": tensors["lm_head.weight"].clone()}
    save_file(tensors | layer, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors | layer


def export(stage: Stage, folder: Path, family: str) -> None:
    tensors = tensors_of(stage) | biases_of(stage)
    export_weights(folder, stage.model_config, tensors=tensors.items(), family=family)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_multi_token_prediction_comes_back_byte_for_byte(family: str, tmp_path: Path) -> None:
    published = with_mtp(family, tmp_path)
    stage = load(tmp_path)
    assert stage.model_config.mtp.num_layers == 1
    assert torch.equal(
        stage.mtp_layers[0].eh_proj.weight, published["model.layers.3.eh_proj.weight"]
    )
    export(stage, tmp_path / "out", family)
    written = load_file(tmp_path / "out/model.safetensors")
    assert written.keys() == published.keys()
    assert [
        name for name, tensor in published.items() if not torch.equal(tensor, written[name])
    ] == []
    export(load(tmp_path / "out"), tmp_path / "again", family)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()


def test_transformers_reads_an_export_and_leaves_the_layer_out(tmp_path: Path) -> None:
    with_mtp("glm4_moe", tmp_path)
    stage = load(tmp_path)
    export(stage, tmp_path / "out", "glm4_moe")
    theirs = Glm4MoeForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            stage.logits(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5
        )


def test_multi_token_prediction_may_be_left_out(tmp_path: Path) -> None:
    """By the user, or by files whose config.json names it, as transformers writes them."""
    with_mtp("deepseek_v3", tmp_path)
    config = model_from_hf(tmp_path)
    none = replace(config, mtp=MTPConfig(num_layers=0))
    assert (
        check_against(config, none, explicit=frozenset({"mtp.num_layers"})).mtp.num_layers is None
    )
    assert check_against(config, ModelConfig(), explicit=frozenset()).mtp.num_layers == 1
    two = replace(config, mtp=MTPConfig(num_layers=2))
    with pytest.raises(HuggingFaceError, match="--mtp-num-layers 2 contradicts"):
        check_against(config, two, explicit=frozenset({"mtp.num_layers"}))
    reference("deepseek_v3").save_pretrained(tmp_path)
    assert model_from_hf(tmp_path).mtp.num_layers is None


def test_a_checkpoint_of_a_folder_has_biases_and_multi_token_prediction(tmp_path: Path) -> None:
    published = with_mtp("deepseek_v3", tmp_path / "in")
    import_hf(tmp_path / "in", tmp_path / "step")
    export_checkpoint(tmp_path / "step", tmp_path / "out", family="deepseek_v3")
    written = load_file(tmp_path / "out/model.safetensors")
    assert written.keys() == published.keys()
    assert all(torch.equal(tensor, written[name]) for name, tensor in published.items())
    assert not load_stage(open_model(tmp_path / "step")).mtp_layers, "for generation and evaluation"


def test_a_kimi_k2_is_a_deepseek_v3_of_another_name(tmp_path: Path) -> None:
    reference("moonlight").save_pretrained(tmp_path / "in")
    expected = tensors_of(load(tmp_path / "in"))
    raw = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps(raw | {"model_type": "kimi_k2"}))
    ours = load(tmp_path / "in")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors_of(ours).items())
    tensors = tensors_of(ours) | biases_of(ours)
    export_weights(tmp_path / "out", ours.model_config, tensors=tensors.items(), family="kimi_k2")
    written, read = (load_file(tmp_path / side / "model.safetensors") for side in ("out", "in"))
    assert written.keys() == read.keys() and all(
        torch.equal(written[name], read[name]) for name in read
    )
