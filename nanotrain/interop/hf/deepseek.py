"""DeepSeek-V3 and GLM-4-MoE: config.json read and written, and the names of their tensors.

Both route by sigmoid scores with an expert bias, and have dense first layers and a shared expert. DeepSeek-V3 has MLA,
and its files pair neighbouring rotary channels; GLM-4-MoE rotates half of the channels of a head. Layers of multi-token
prediction follow the model's in the files, with copies of embedding and head: they are read where config.json and the
files have them, and written. transformers ignores them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanotrain.config.config import MLAConfig, ModelConfig, MoEConfig, MTPConfig, RouterScore
from nanotrain.config.pattern import write_pattern
from nanotrain.interop.hf.llama import LLAMA, read_shared, write_shared
from nanotrain.interop.hf.naming import HFName, Naming
from nanotrain.interop.hf.reject import reject, require_values
from nanotrain.spec.shape import ModelShape

# Defaults of transformers for entries that config.json omits.
DEEPSEEK_V3: dict[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
}
GLM4_MOE: dict[str, Any] = {
    "vocab_size": 151552,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
}
COMPRESSED_NORM_EPSILON = 1e-6  # of transformers' norms of compressed vectors, whatever rms_norm_eps is


def read_deepseek_v3(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a DeepSeek-V3.

    Raises:
        HuggingFaceError: an unsupported feature.
    """
    raw = {**DEEPSEEK_V3, **raw}
    require_values(raw, {"attention_bias": False, "rope_interleave": True, "rms_norm_eps": COMPRESSED_NORM_EPSILON})
    heads = raw["num_attention_heads"]
    if raw.get("num_key_value_heads") not in (None, heads):
        reject("num_key_value_heads", raw["num_key_value_heads"], instead=f"{heads}, equal to num_attention_heads,")
    # Entries about the width of a head that MLA does not read.
    shared = read_shared({**raw, "head_dim": None, "num_key_value_heads": None}, default_positions=4096)
    del shared["num_query_groups"], shared["kv_channels"]
    return ModelConfig(
        multi_latent_attention=True,
        mla=MLAConfig(
            q_lora_rank=raw.get("q_lora_rank", 1536),
            kv_lora_rank=raw.get("kv_lora_rank", 512),
            qk_head_dim=raw.get("qk_nope_head_dim", 128),
            qk_pos_emb_head_dim=raw.get("qk_rope_head_dim", 64),
            v_head_dim=raw.get("v_head_dim", 128),
        ),
        **read_experts(raw, shared),
    )


def read_glm4_moe(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a GLM-4-MoE; see `read_deepseek_v3`."""
    raw = {**GLM4_MOE, **raw}
    shared = read_shared({"partial_rotary_factor": 0.5, **raw}, default_positions=131072, has_partial_rope=True)
    return ModelConfig(
        add_qkv_bias=bool(raw.get("attention_bias", False)),
        qk_layernorm=bool(raw.get("use_qk_norm", False)),
        **read_experts(raw, shared),
    )


def read_experts(raw: Mapping[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """The shared fields with those of the experts, from a config.json that has every entry about them."""
    require_values(raw, {"norm_topk_prob": True})
    num_layers, num_groups, topk = shared["num_layers"], raw["n_group"] or 1, raw["num_experts_per_tok"]
    group_topk = raw["topk_group"] or 1
    if num_groups > 1 and topk // group_topk != 2:  # transformers ranks a group by its two best experts
        reject("num_experts_per_tok", topk, instead=f"{2 * group_topk}, two per group that a token may use,")
    layers = tuple(layer >= (raw["first_k_dense_replace"] or 0) for layer in range(num_layers))
    if not any(layers):
        reject("first_k_dense_replace", raw["first_k_dense_replace"], instead=f"below {num_layers}")
    num_shared = raw["n_shared_experts"] or 0
    moe = MoEConfig(
        num_experts=raw["n_routed_experts"],
        layer_freq=write_pattern(layers),
        ffn_hidden_size=raw["moe_intermediate_size"],
        shared_expert_intermediate_size=num_shared * raw["moe_intermediate_size"] if num_shared else None,
        router_topk=topk,
        router_score_function=RouterScore.sigmoid,
        router_topk_scaling_factor=float(raw["routed_scaling_factor"]),
        router_num_groups=num_groups if num_groups > 1 else None,
        router_group_topk=group_topk if num_groups > 1 else None,
        router_enable_expert_bias=True,
    )
    mtp = MTPConfig(num_layers=raw.get("num_nextn_predict_layers") or None)
    return {**shared, "moe": moe, "mtp": mtp, "ffn_hidden_size": None if all(layers) else shared["ffn_hidden_size"]}


def write_deepseek_v3(model_config: ModelConfig) -> dict[str, Any]:
    """Write the config.json of a DeepSeek-V3; what it cannot represent is detected by reading it back."""
    mla = model_config.mla or MLAConfig()
    attention = {
        "attention_bias": False,
        "kv_lora_rank": mla.kv_lora_rank,
        "num_key_value_heads": model_config.num_attention_heads,
        "q_lora_rank": mla.q_lora_rank,
        "qk_nope_head_dim": mla.qk_head_dim,
        "qk_rope_head_dim": mla.qk_pos_emb_head_dim,
        "rope_interleave": True,
        "v_head_dim": mla.v_head_dim,
    }
    entries = write_shared(model_config) | write_experts(model_config) | attention
    del entries["head_dim"]  # transformers means the rotary channels by it
    return entries


def write_glm4_moe(model_config: ModelConfig) -> dict[str, Any]:
    """Write the config.json of a GLM-4-MoE; see `write_deepseek_v3`."""
    attention = {
        "attention_bias": model_config.add_qkv_bias,
        "partial_rotary_factor": model_config.rotary_percent,
        "use_qk_norm": model_config.qk_layernorm,
    }
    return write_shared(model_config) | write_experts(model_config) | attention


def write_experts(model_config: ModelConfig) -> dict[str, Any]:
    """Entries of config.json about the experts."""
    shape, moe = ModelShape.of(model_config), model_config.moe or MoEConfig()
    ffn_size = shape.ffn_size if shape.moe is None else shape.moe.ffn_size
    return {
        "first_k_dense_replace": next(
            (layer for layer in range(shape.num_layers) if shape.has_experts(layer)), shape.num_layers
        ),
        "moe_intermediate_size": ffn_size,
        "n_group": moe.router_num_groups or 1,
        "n_routed_experts": moe.num_experts or 0,
        "n_shared_experts": (moe.shared_expert_intermediate_size or 0) // ffn_size,
        "norm_topk_prob": True,
        "num_experts_per_tok": moe.router_topk,
        "num_nextn_predict_layers": model_config.mtp.num_layers or 0,
        "routed_scaling_factor": moe.router_topk_scaling_factor,
        "topk_group": moe.router_group_topk or 1,
    }


def _naming(attention: Mapping[str, str | HFName], experts: Mapping[str, str | HFName]) -> Naming:
    """The names of Llama, and those of the attention and of the experts' gate, up and down."""
    routed = {f"mlp.experts.{name}": tensor for name, tensor in experts.items()}
    shared = {f"mlp.shared.{name}": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")}
    router = {"mlp.router": "mlp.gate"}
    bias = {"mlp.router.expert_bias": HFName("mlp.gate.e_score_correction_bias", is_full=True)}
    return replace(
        LLAMA,
        layers={**LLAMA.layers, **attention, **router, **bias, **routed, **shared},
        mtp={"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_norm": "shared_head.norm"},
        mtp_copies={"embedding.word": "embed_tokens", "head": "shared_head.head"},
    )


MLA_NAMES: dict[str, str | HFName] = {
    "attention.query": HFName("self_attn.q_proj", has_neighbour_pairs=True),
    "attention.query_down": "self_attn.q_a_proj",
    "attention.query_latent_norm": "self_attn.q_a_layernorm",
    "attention.query_up": HFName("self_attn.q_b_proj", has_neighbour_pairs=True),
    "attention.kv_down": HFName("self_attn.kv_a_proj_with_mqa", has_neighbour_pairs=True),
    "attention.kv_latent_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
}
GATE_UP = ("mlp.experts.gate", "mlp.experts.up")
# In the files, and in memory in transformers 5.
APART = {name: f"mlp.experts.{{expert}}.{name}_proj" for name in ("gate", "up", "down")}
FUSED = {
    "gate": HFName("mlp.experts.gate_up_proj", fused=GATE_UP, is_full=True),
    "up": HFName("mlp.experts.gate_up_proj", fused=GATE_UP, is_full=True),
    "down": HFName("mlp.experts.down_proj", is_full=True),
}
DEEPSEEK_V3_NAMES, DEEPSEEK_V3_FUSED = _naming(MLA_NAMES, APART), _naming(MLA_NAMES, FUSED)
GLM4_MOE_NAMES, GLM4_MOE_FUSED = _naming({}, APART), _naming({}, FUSED)
