"""Entries of config.json about residual connections, and of families with attention beside the MLP,
as parts (parts.py).

neox_residual       side by side or not, with two norms; biases of MLPs alone
neox_rope           rotary positions under the names of GPT-NeoX
gptj_rotary         the number of rotary channels
falcon              key/value heads, and one norm or two
stablelm_residual   side by side or not, with one norm
logit_scale         Cohere: a factor of the logits
cohere_windows      Cohere 2: rotary positions only in layers with a window
cohere_moe          Cohere 2 MoE: the kind of norms, experts, rotary positions
compass_rope        Cohere Compass: rotary positions by kind of layer, or none
minicpm             MiniCPM 3: factors by the depth and the width of a base model
"""

import math

from nanotrain.config.model import ModelConfig, MoEConfig
from nanotrain.interop.hf.canonical import resolved, write_layers
from nanotrain.interop.hf.config_class import pass_over
from nanotrain.interop.hf.experts import read_mlp_types, write_num_shared
from nanotrain.interop.hf.layer_types import FULL, rounded
from nanotrain.interop.hf.layout import Part, Raw, Values, reject
from nanotrain.interop.hf.positions import read_rope, write_rope
from nanotrain.interop.hf.windows import SLIDING, read_rope_in_windows, read_window_layers


def _read_neox(raw: Raw) -> Values:
    has_bias = bool(raw["attention_bias"])
    return {
        "residual_type": "parallel" if raw["use_parallel_residual"] else "plain",
        "add_bias_linear": has_bias,
        "add_mlp_bias": not has_bias,
    }


def _write_neox(model_config: ModelConfig) -> Values:
    return {
        "use_parallel_residual": model_config.residual_type == "parallel",
        "attention_bias": model_config.add_bias_linear,
    }


def _read_neox_rope(raw: Raw) -> Values:
    named = {"rope_theta": raw["rotary_emb_base"], "partial_rotary_factor": raw["rotary_pct"]}
    return read_rope(raw | named, has_partial=True)


def _write_neox_rope(model_config: ModelConfig) -> Values:
    """The names of GPT-NeoX, which are the ones that its class reads."""
    return {
        "rope_scaling": write_rope(model_config)["rope_scaling"],
        "rotary_emb_base": model_config.rotary_base,
        "rotary_pct": model_config.rotary_percent,
    }


def _read_gptj_rotary(raw: Raw) -> Values:
    rotary_dim = raw["rotary_dim"]
    if not rotary_dim:
        reject("rotary_dim", rotary_dim, instead="the number of rotary channels")
    return {"rotary_percent": rotary_dim * raw["n_head"] / raw["n_embd"]}


def _write_gptj_rotary(model_config: ModelConfig) -> Values:
    return {"rotary_dim": model_config.rotary_dim}


def _read_falcon(raw: Raw) -> Values:
    """Falcon 40B and later (`new_decoder_architecture`), or Falcon 7B."""
    is_new = bool(raw["new_decoder_architecture"])
    num_norms = raw["num_ln_in_parallel_attn"]
    if num_norms is None:
        num_norms = 2 if is_new else 1
    if num_norms not in (1, 2) or (num_norms == 2 and not is_new):
        reject("num_ln_in_parallel_attn", num_norms, instead="1, or 2 in a new decoder,")
    groups = raw["num_attention_heads"]
    if is_new:
        groups = raw.get("num_kv_heads") or groups
    elif raw["multi_query"]:
        groups = 1
    return {"num_query_groups": groups, "parallel_shared_norm": num_norms == 1}


def _write_falcon(model_config: ModelConfig) -> Values:
    """Falcon 7B as it was published, all others as new decoders."""
    has_one_norm = model_config.parallel_shared_norm
    groups = model_config.query_groups
    is_new = groups != 1 or not has_one_norm
    return {
        "multi_query": True,
        "new_decoder_architecture": is_new,
        "num_kv_heads": groups if is_new else model_config.num_attention_heads,
        "num_ln_in_parallel_attn": 1 if has_one_norm else 2,
    }


def _read_stablelm(raw: Raw) -> Values:
    is_parallel = bool(raw["use_parallel_residual"])
    return {
        "residual_type": "parallel" if is_parallel else "plain",
        "parallel_shared_norm": is_parallel,
    }


def _write_stablelm(model_config: ModelConfig) -> Values:
    return {"use_parallel_residual": model_config.residual_type == "parallel"}


def _read_logit_scale(raw: Raw) -> Values:
    """The factor on logits, here a divisor."""
    scale = raw["logit_scale"]
    if scale is None:
        return {"logits_scaling": 1.0}
    if not scale:
        reject("logit_scale", scale, instead="above 0")
    return {"logits_scaling": 1 / scale}


def _write_logit_scale(model_config: ModelConfig) -> Values:
    return {"logit_scale": 1 / model_config.logits_scaling}


def _read_cohere_windows(raw: Raw) -> Values:
    if raw["sliding_window"] is None:  # then no layer has rotary positions
        reject("sliding_window", None, instead="a number")
    return read_rope_in_windows(raw)


def _read_cohere_moe(raw: Raw) -> Values:
    """The kind of norms, the layers with experts, and rotary positions in windows.

    With `prefix_dense_sliding_window_pattern` 1 dense layers have rotary positions too.
    """
    values = read_mlp_types(raw)
    values["ffn_hidden_size"] = None
    kinds = raw["mlp_layer_types"]
    width = raw["prefix_dense_intermediate_size"]
    if "dense" in kinds:
        values["ffn_hidden_size"] = raw["intermediate_size"] if width is None else width
    if raw["sliding_window"] is None:  # then layers of both kinds are without rotary positions
        reject("sliding_window", None, instead="a number")
    dense_have_rope = raw["prefix_dense_sliding_window_pattern"] == 1
    without = []
    for kind, has_window in zip(kinds, read_window_layers(raw), strict=True):
        has_rope = has_window or (kind == "dense" and dense_have_rope)
        without.append(not has_rope)
    values["no_rope_freq"] = write_layers(without)
    values |= _read_cohere_norm(raw)
    score = raw["expert_selection_fn"]
    if score == "sigmoid" and not raw["norm_topk_prob"]:
        reject("norm_topk_prob", False, instead="true beside sigmoid")
    values["moe.router_score_function"] = score
    values |= {"moe.router_norm_epsilon": 0.0} if score == "sigmoid" else {}
    num_shared = raw["num_shared_experts"]
    strategy = raw["shared_expert_combination_strategy"]
    if num_shared:
        if strategy not in ("average", "sum"):
            reject("shared_expert_combination_strategy", strategy, instead="average or sum")
        values["moe.shared_expert_intermediate_size"] = num_shared * raw["intermediate_size"]
        values["moe.shared_expert_average"] = strategy == "average"
    return values


def _read_cohere_norm(raw: Raw) -> Values:
    """An RMSNorm where it has an epsilon, else a LayerNorm without bias."""
    epsilon = raw["rms_norm_eps"]
    if epsilon is not None:
        pass_over(raw, "layer_norm_eps")
        return {"normalization": "RMSNorm", "norm_epsilon": epsilon}
    return {
        "layernorm_parameters": "weight",
        "normalization": "LayerNorm",
        "norm_epsilon": raw["layer_norm_eps"],
    }


def _write_cohere_moe(model_config: ModelConfig) -> Values:
    """The kinds of the layers, scores of experts and kind of norms."""
    moe = resolved(model_config).moe or MoEConfig()
    epsilon = model_config.norm_epsilon
    is_rms = model_config.normalization == "RMSNorm"
    kinds = ["sparse" if has_experts else "dense" for has_experts in model_config.moe_layers]
    full_dense = []  # whether dense layers without a window have no rotary positions
    for kind, has_window, without in zip(
        kinds, model_config.window_layers, model_config.no_rope_layers, strict=True
    ):
        if kind == "dense" and not has_window:
            full_dense.append(without)
    return {
        "expert_selection_fn": moe.router_score_function,
        "layer_norm_eps": epsilon,
        "mlp_layer_types": kinds,
        "norm_topk_prob": True,
        "num_shared_experts": write_num_shared(model_config),
        "prefix_dense_intermediate_size": model_config.ffn_size,
        "prefix_dense_sliding_window_pattern": 4 if any(full_dense) else 1,
        "rms_norm_eps": epsilon if is_rms else None,
        "shared_expert_combination_strategy": "average" if moe.shared_expert_average else "sum",
    }


def _read_compass_rope(raw: Raw) -> Values:
    """A table of rotary positions per kind of layer; null for layers without."""
    windows = read_window_layers(raw)
    tables = {}
    for kind, has_window in ((FULL, False), (SLIDING, True)):
        if has_window not in windows:
            continue
        if kind not in raw["rope_parameters"]:
            reject(f"{kind} in rope_parameters", None, instead="a table, or null in it,")
        table = raw["rope_parameters"][kind]
        if table is None:
            continue
        rope_type = table.get("rope_type", "default")
        if rope_type != "default":
            reject(f"rope_type of {kind}", rope_type, instead="default")
        tables[kind] = float(table["rope_theta"])
    if not tables:
        return {"position_embedding_type": "none"}
    without = []
    for has_window in windows:
        without.append((SLIDING if has_window else FULL) not in tables)
    bases = list(tables.values())
    values: Values = {"rotary_base": bases[0], "no_rope_freq": write_layers(without)}
    if bases[-1] != bases[0]:
        values["rotary_base_local"] = bases[-1]
    return values


def _write_compass_rope(model_config: ModelConfig) -> Values:
    """A table of rotary positions per kind of layer; null for layers without."""
    base = model_config.rotary_base
    bases = {FULL: base, SLIDING: model_config.rotary_base_local or base}
    tables: dict[str, Values | None] = {FULL: None, SLIDING: None}
    layers = zip(model_config.window_layers, model_config.no_rope_layers, strict=True)
    for has_window, is_without in layers:
        kind = SLIDING if has_window else FULL
        if model_config.has_rope and not is_without:
            tables[kind] = {"rope_type": "default", "rope_theta": bases[kind]}
    return {"rope_parameters": tables}


def _read_minicpm(raw: Raw) -> Values:
    """Outputs of sublayers by the depth of the model, logits by the width of a base model."""
    depth = raw["num_hidden_layers"]
    return {
        "logits_scaling": rounded(raw["hidden_size"] / raw["dim_model_base"]),
        "residual_multiplier": rounded(raw["scale_depth"] / math.sqrt(depth)),
    }


def _write_minicpm(model_config: ModelConfig) -> Values:
    scale = model_config.residual_multiplier * math.sqrt(model_config.num_layers)
    return {
        "dim_model_base": round(model_config.hidden_size / model_config.logits_scaling),
        "scale_depth": rounded(scale),
    }


RESIDUAL_PARTS: dict[str, Part] = {
    "neox_residual": Part(_read_neox, _write_neox),
    "neox_rope": Part(_read_neox_rope, _write_neox_rope),
    "gptj_rotary": Part(_read_gptj_rotary, _write_gptj_rotary),
    "falcon": Part(_read_falcon, _write_falcon),
    "stablelm_residual": Part(_read_stablelm, _write_stablelm),
    "logit_scale": Part(_read_logit_scale, _write_logit_scale),
    "cohere_windows": Part(_read_cohere_windows),
    "cohere_moe": Part(_read_cohere_moe, _write_cohere_moe),
    "compass_rope": Part(_read_compass_rope, _write_compass_rope),
    "minicpm": Part(_read_minicpm, _write_minicpm),
}
