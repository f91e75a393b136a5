"""Entries of config.json about Gemma 4, as parts (parts.py).

gemma4_heads   widths and numbers of heads, in layers with a window and in the others
gemma4_experts experts beside a dense MLP
gemma4_rope    rotary positions: all channels in windows, a share of the pairs in the others
"""

from typing import Any

from nanotrain.config.model import ModelConfig
from nanotrain.interop.hf.canonical import resolved
from nanotrain.interop.hf.config_class import pass_over
from nanotrain.interop.hf.layer_types import FULL
from nanotrain.interop.hf.layout import Part, Raw, Values, reject
from nanotrain.interop.hf.windows import SLIDING


def _read_heads(raw: Raw) -> Values:
    """`per_layer_config` has the heads of layers without a window, the same in all of them."""
    kinds = raw["layer_types"]
    own = {int(layer): dict(entries) for layer, entries in (raw["per_layer_config"] or {}).items()}
    full = [layer for layer, kind in enumerate(kinds) if kind == FULL]
    if not full:
        reject("layer_types", kinds, instead=f"a list with {FULL}")
    heads: dict[str, Any] = own.get(full[0], {})
    for layer in range(len(kinds)):
        expected = heads if layer in full else {}
        if own.get(layer, {}) != expected:
            reject("per_layer_config", own, instead="the same for all layers without a window")
    unknown = sorted(heads.keys() - {"head_dim", "num_key_value_heads"})
    if unknown:
        reject("per_layer_config", heads, instead="head_dim and num_key_value_heads")
    if raw["num_kv_shared_layers"] == 0:
        pass_over(raw, "use_double_wide_mlp")
    num_rows = raw["vocab_size_per_layer_input"]
    if raw["hidden_size_per_layer_input"] and num_rows != raw["vocab_size"]:
        reject("vocab_size_per_layer_input", num_rows, instead=f"vocab_size, {raw['vocab_size']},")
    head_dim = raw["head_dim"]
    groups = raw["num_key_value_heads"]
    values: Values = {
        "kv_channels": heads.get("head_dim", head_dim),
        "num_query_groups": heads.get("num_key_value_heads", groups),
    }
    if SLIDING in kinds:
        values["window_kv_channels"] = head_dim
        values["window_query_groups"] = groups
    return values


def _write_heads(model_config: ModelConfig) -> Values:
    shape = resolved(model_config)
    heads = {"head_dim": shape.head_dim, "num_key_value_heads": shape.query_groups}
    windows = enumerate(model_config.window_layers)
    return {
        "head_dim": shape.window_head_dim,
        "num_key_value_heads": shape.window_query_groups or shape.query_groups,
        # of layers without a window: as transformers 5.24 reads them, and as earlier versions do
        "per_layer_config": {layer: heads for layer, has_window in windows if not has_window},
        "global_head_dim": shape.head_dim,
        "num_global_key_value_heads": shape.query_groups,
        "vocab_size_per_layer_input": model_config.vocab_size,
    }


EXPERTS = {
    "num_experts": "moe.num_experts",
    "top_k_experts": "moe.router_topk",
    "moe_intermediate_size": "moe.ffn_hidden_size",
    "intermediate_size": "moe.shared_expert_intermediate_size",
}


def _read_experts(raw: Raw) -> Values:
    """Experts in all layers or in none; the dense MLP beside them is a shared expert."""
    if not raw["enable_moe_block"]:
        pass_over(raw, *EXPERTS)
        return {}
    if raw["num_kv_shared_layers"] and raw["use_double_wide_mlp"]:
        # transformers doubles the MLPs beside experts too
        reject("use_double_wide_mlp", True, instead="false in a model with experts")
    values: Values = {key: raw[entry] for entry, key in EXPERTS.items()}
    values["moe.separate_norms"] = True
    return values


def _write_experts(model_config: ModelConfig) -> Values:
    moe = model_config.moe
    if moe is None:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": moe.num_experts,
        "top_k_experts": moe.router_topk,
        "moe_intermediate_size": model_config.moe_ffn_size,
        "intermediate_size": moe.shared_expert_intermediate_size or 0,
    }


def _read_rope(raw: Raw) -> Values:
    tables = raw["rope_parameters"]
    full = dict(tables[FULL])
    local = dict(tables.get(SLIDING) or {})
    if full["rope_type"] != "proportional":
        reject("rope_type of full_attention", full["rope_type"], instead="proportional")
    if full.get("factor", 1.0) != 1.0:
        reject("factor of full_attention", full["factor"], instead="1.0")
    if local.get("rope_type", "default") != "default":
        reject("rope_type of sliding_attention", local["rope_type"], instead="default")
    base = float(full["rope_theta"])
    return {
        "rotary_base": base,
        "rotary_percent": float(full.get("partial_rotary_factor", 1.0)),
        "rotary_base_local": float(local.get("rope_theta", base)),
    }


def _write_rope(model_config: ModelConfig) -> Values:
    base = model_config.rotary_base
    local_base = model_config.rotary_base_local
    if local_base is None:
        local_base = base
    full = {
        "rope_type": "proportional",
        "rope_theta": base,
        "partial_rotary_factor": model_config.rotary_percent,
    }
    windowed = {"rope_type": "default", "rope_theta": local_base}
    return {"rope_parameters": {FULL: full, SLIDING: windowed}}


GEMMA4_PARTS: dict[str, Part] = {
    "gemma4_heads": Part(_read_heads, _write_heads),
    "gemma4_experts": Part(_read_experts, _write_experts),
    "gemma4_rope": Part(_read_rope, _write_rope),
}
