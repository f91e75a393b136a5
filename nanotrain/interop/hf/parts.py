"""Entries of config.json that the tables of families.yaml cannot express, as functions that read
and write them.

PARTS   all parts by the names that families.yaml has for them; positions.py and layer_types.py have others
"""

from nanotrain.config.model import ModelConfig, MoEConfig
from nanotrain.interop.hf.canonical import resolved
from nanotrain.interop.hf.layer_types import (
    FULL,
    LAYER_PARTS,
    expert_layers,
    read_dense_first,
    write_dense_first,
)
from nanotrain.interop.hf.layout import Part, Raw, Values, reject
from nanotrain.interop.hf.positions import POSITION_PARTS


def _read_full_attention(raw: Raw) -> Values:
    """Refuse a Qwen with sliding-window attention."""
    if kinds := set(raw.get("layer_types") or ()) - {FULL}:
        reject("layer_types", sorted(kinds)[0], instead=FULL)
    # Without layer_types the window applies from layer max_window_layers on.
    has_window = raw.get("use_sliding_window") and raw.get("sliding_window", 0) is not None
    has_window = has_window and not raw.get("layer_types")
    if has_window and raw.get("max_window_layers", 28) < raw["num_hidden_layers"]:
        reject("use_sliding_window", True, instead="false")
    return {}


def _read_biases(raw: Raw) -> Values:
    attention, mlp = raw.get("attention_bias", False), raw.get("mlp_bias", False)
    if attention != mlp:
        reject("attention_bias", attention, instead=f"that of mlp_bias, {str(mlp).lower()}")
    return {"add_bias_linear": bool(attention)}


def _write_biases(model_config: ModelConfig) -> Values:
    return {
        "attention_bias": model_config.add_bias_linear,
        "mlp_bias": model_config.add_bias_linear,
    }


def _write_router(model_config: ModelConfig) -> Values:
    # transformers multiplies by the top k and takes the mean over layers, where the layers are
    # summed here
    moe, num_layers = model_config.moe or MoEConfig(), sum(model_config.moe_layers)
    coefficient = sum(moe.aux_loss_coeff) * num_layers / moe.router_topk
    return {"output_router_logits": False, "router_aux_loss_coef": coefficient}


def _read_layers(raw: Raw) -> Values:
    dense, step = set(raw.get("mlp_only_layers") or ()), raw.get("decoder_sparse_step", 1)
    layers = tuple(
        layer not in dense and (layer + 1) % step == 0 for layer in range(raw["num_hidden_layers"])
    )
    if not any(layers):
        reject("num_experts", raw["num_experts"], instead="above 0, with experts in some layer,")
    return _read_normalized(raw) | expert_layers(layers)


def _read_normalized(raw: Raw) -> Values:
    return {"moe.router_pre_softmax": not raw.get("norm_topk_prob", False)}


def _write_normalized(model_config: ModelConfig) -> Values:
    return {"norm_topk_prob": not (model_config.moe or MoEConfig()).router_pre_softmax}


def _write_layers(model_config: ModelConfig) -> Values:
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [
            layer for layer, has_experts in enumerate(model_config.moe_layers) if not has_experts
        ],
        **_write_normalized(model_config),
    }


def _read_experts(raw: Raw) -> Values:
    values = read_dense_first(raw) | _read_groups(raw) | _read_shared(raw)
    if num_mtp_layers := raw.get("num_nextn_predict_layers"):
        values["mtp.num_layers"] = num_mtp_layers
    return values


def _write_experts(model_config: ModelConfig) -> Values:
    return {
        **write_dense_first(model_config),
        **_write_shared(model_config),
        "num_nextn_predict_layers": model_config.mtp.num_layers or 0,
        **_write_groups(model_config),
    }


def _read_shared(raw: Raw) -> Values:
    size = (raw["n_shared_experts"] or 0) * raw["moe_intermediate_size"]
    return {"moe.shared_expert_intermediate_size": size} if size else {}


def _write_shared(model_config: ModelConfig) -> Values:
    moe = resolved(model_config).moe or MoEConfig()
    return {
        "n_shared_experts": (moe.shared_expert_intermediate_size or 0) // (moe.ffn_hidden_size or 1)
    }


def _read_groups(raw: Raw) -> Values:
    num_groups, group_topk, topk = (
        raw["n_group"] or 1,
        raw["topk_group"] or 1,
        raw["num_experts_per_tok"],
    )
    # transformers ranks a group by its two best experts
    if num_groups > 1 and topk // group_topk != 2:
        reject(
            "num_experts_per_tok",
            topk,
            instead=f"{2 * group_topk}, two per group that a token may use,",
        )
    return (
        {"moe.router_num_groups": num_groups, "moe.router_group_topk": group_topk}
        if num_groups > 1
        else {}
    )


def _write_groups(model_config: ModelConfig) -> Values:
    moe = model_config.moe or MoEConfig()
    return {"n_group": moe.router_num_groups or 1, "topk_group": moe.router_group_topk or 1}


def _read_mla(raw: Raw) -> Values:
    heads, groups = raw["num_attention_heads"], raw.get("num_key_value_heads")
    if groups not in (None, heads):
        reject("num_key_value_heads", groups, instead=f"{heads}, equal to num_attention_heads,")
    # of transformers' norms of compressed vectors, whatever rms_norm_eps is
    return {"multi_latent_attention": True} | (
        {"mla.compressed_norm_epsilon": 1e-6} if raw["rms_norm_eps"] != 1e-6 else {}
    )


def _read_scale(raw: Raw) -> Values:
    scalar = raw["query_pre_attn_scalar"]
    return {"softmax_scale": None if scalar == raw["head_dim"] else scalar**-0.5}


def _write_scale(model_config: ModelConfig) -> Values:
    scale = model_config.softmax_scale
    return {
        "query_pre_attn_scalar": resolved(model_config).kv_channels
        if scale is None
        else round(scale**-2)
    }


# Names of the activations in config.json.
ACTIVATIONS = {
    "gelu": "gelu",
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh"),
}


def _read_activation(raw: Raw) -> Values:
    name = raw["activation_function"]
    if name not in ACTIVATIONS:
        reject("activation_function", name, instead=f"one of {', '.join(ACTIVATIONS)}")
    return {"activation": ACTIVATIONS[name]}


def _write_activation(model_config: ModelConfig) -> Values:
    return {"activation_function": "gelu" if model_config.activation == "gelu" else "gelu_new"}


def _read_heads(raw: Raw) -> Values:
    heads = raw["num_attention_heads"]
    return {
        "kv_channels": raw.get("head_dim") or raw["hidden_size"] // heads,
        "num_query_groups": raw.get("num_key_value_heads") or heads,
    }


def _read_hunyuan_experts(raw: Raw) -> Values:
    given = raw["num_experts_per_tok"]
    topk, *others = given if isinstance(given, list) else [given]
    if {*others} - {topk}:
        reject("moe_topk", given, instead="one number for all layers")
    return expert_layers((True,) * raw["num_hidden_layers"]) | {
        "moe.router_topk": topk,
        "moe.shared_expert_intermediate_size": raw["intermediate_size"],
    }


def _write_hunyuan_experts(model_config: ModelConfig) -> Values:
    return {"num_experts_per_tok": (model_config.moe or MoEConfig()).router_topk}


PARTS: dict[str, Part] = {
    "full_attention": Part(_read_full_attention),
    "heads": Part(_read_heads),
    "mla": Part(
        _read_mla, lambda model_config: {"num_key_value_heads": model_config.num_attention_heads}
    ),
    "softmax_scale": Part(_read_scale, _write_scale),
    "llama_biases": Part(_read_biases, _write_biases),
    "gpt2_activation": Part(_read_activation, _write_activation),
    "router_losses": Part(write=_write_router),
    "qwen_experts": Part(_read_layers, _write_layers),
    "deepseek_experts": Part(_read_experts, _write_experts),
    "hunyuan_experts": Part(_read_hunyuan_experts, _write_hunyuan_experts),
    "shared_experts": Part(_read_shared, _write_shared),
    "normalized_weights": Part(_read_normalized, _write_normalized),
    "router_groups": Part(_read_groups, _write_groups),
    **LAYER_PARTS,
    **POSITION_PARTS,
}
