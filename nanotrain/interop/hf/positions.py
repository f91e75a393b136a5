"""Entries of config.json about rotary positions and windows, as parts (parts.py).

    read_rope, write_rope   rotary positions

They are read in both existing formats (`rope_theta` + `rope_scaling` before transformers 5,
`rope_parameters` since) and written in the older one, which every version reads.
"""

import math
from functools import partial
from typing import Any

from nanotrain.config.model import ModelConfig, YarnConfig
from nanotrain.config.notation import read_layer_pattern, write_pattern
from nanotrain.config.schema import value_of, with_values
from nanotrain.interop.hf.layer_types import FULL, expert_layers, layers_of
from nanotrain.interop.hf.layout import Part, Raw, Values, reject
from nanotrain.interop.hf.tables import read_tables

SLIDING, CHUNKED = "sliding_attention", "chunked_attention"
NO_ROPE = {"rope_type": None, "rope_theta": None}
ROPE_KINDS: dict[str, dict[str, str]] = read_tables()["rope_kinds"]


def read_rope(raw: Raw, *, has_partial: bool = False) -> Values:
    """The values of the model section about rotary positions.

    Args:
        raw: the parsed config.json.
        has_partial: whether the family reads `partial_rotary_factor`, the rotated share of the
            channels.

    Raises:
        HuggingFaceError: an unsupported kind of scaling, or entries that are no numbers.
    """
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    partial_factor = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial_factor is None and raw.get("rotary_dim") is not None:  # MiniMax-M2, as published
        partial_factor = raw["rotary_dim"] / raw["head_dim"]
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not has_partial and partial_factor not in (1.0, None):
        reject("partial_rotary_factor", partial_factor, instead="1.0")
    if rope.get("llama_4_scaling_beta"):
        reject("llama_4_scaling_beta", rope["llama_4_scaling_beta"], instead="0")
    if kind not in ROPE_KINDS:
        reject("rope_type", kind, instead=f"one of {', '.join(ROPE_KINDS)}")
    base: Any = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    values: Values = {"rotary_base": float(base)}
    values |= {"rotary_percent": 1.0 if partial_factor is None else float(partial_factor)}
    original = raw.get("max_position_embeddings", 2048)
    defaults = {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": original}
    for entry, key in ROPE_KINDS[kind].items():
        value = rope.get(entry) or defaults.get(entry)
        if isinstance(value, bool) or not isinstance(value, int | float):
            reject(f"{entry} of its {kind} rotary scaling", value, instead="a number")
        values[key] = value
    if kind == "llama3":
        values["use_rope_scaling"] = True
    return _read_yarn(rope, values) if kind == "yarn" else values


def _read_yarn(rope: Raw, values: Values) -> Values:
    values["position_embedding_type"] = "yarn"
    values["yarn.correction_range_round_to_int"] = bool(rope.get("truncate", True))
    # transformers ignores one without the other
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        values |= {
            "yarn.mscale": float(rope["mscale"]),
            "yarn.mscale_all_dim": float(rope["mscale_all_dim"]),
        }
    yarn: YarnConfig = with_values(ModelConfig(), values).yarn
    expected, length = yarn.rotary_mscale, rope.get("attention_factor")
    if length is not None and not math.isclose(length, expected, rel_tol=1e-6):
        reject(
            "attention_factor of its yarn rotary scaling", length, instead=f"null or {expected:.6g}"
        )
    return values


def write_rope(model_config: ModelConfig) -> Values:
    """Entries about rotary positions."""
    yarn = model_config.yarn
    is_linear = model_config.rotary_seq_len_interpolation_factor != 1
    kind = (
        "yarn"
        if yarn is not None
        else "llama3"
        if model_config.use_rope_scaling
        else "linear"
        if is_linear
        else ""
    )
    scaling: Values = {
        entry: value_of(model_config, key) for entry, key in ROPE_KINDS.get(kind, {}).items()
    }
    scaling |= {"rope_type": kind}
    if yarn is not None:
        scaling["type"] = "yarn"
        if not yarn.correction_range_round_to_int:
            scaling["truncate"] = False
        if yarn.mscale_all_dim > 0:
            scaling |= {"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim}
    share = (
        {}
        if model_config.rotary_percent == 1
        else {"partial_rotary_factor": model_config.rotary_percent}
    )
    return {
        "rope_scaling": scaling if kind else None,
        "rope_theta": model_config.rotary_base,
    } | share


def read_layered_rope(raw: Raw, *, has_partial: bool = False) -> Values:
    """`read_rope` of a model whose layers with a window have unscaled positions and may have
    another base.
    """
    stored = raw.get("rope_parameters") or {}
    is_layered = FULL in stored or SLIDING in stored
    full, local = (
        (stored.get(FULL) or {}, stored.get(SLIDING) or {}) if is_layered else (stored, {})
    )
    if local.get("rope_type", "default") != "default":
        reject("rope_type of sliding_attention", local["rope_type"], instead="default")
    values = read_rope({**raw, "rope_parameters": full}, has_partial=has_partial)
    share = values["rotary_percent"]
    if local.get("partial_rotary_factor", share) != share:
        reject(
            "partial_rotary_factor of sliding_attention",
            local["partial_rotary_factor"],
            instead=str(share),
        )
    local_base: Any = local.get(
        "rope_theta", raw.get("rope_local_base_freq", values["rotary_base"])
    )
    values["rotary_base_local"] = float(local_base)
    return values


def write_layered_rope(model_config: ModelConfig) -> Values:
    """Entries about rotary positions of such a model, in both formats."""
    entries, base = write_rope(model_config), model_config.rotary_base
    local = base if model_config.rotary_base_local is None else model_config.rotary_base_local
    shared = {"rope_type": "default", "partial_rotary_factor": model_config.rotary_percent}
    full = shared | (entries["rope_scaling"] or {}) | {"rope_theta": base}
    layered = {FULL: full, SLIDING: shared | {"rope_theta": local}}
    return entries | {"rope_local_base_freq": local, "rope_parameters": layered}


def _write_partial_layered_rope(model_config: ModelConfig) -> Values:
    """In the newer format alone, which transformers does not convert to for MiMo-V2."""
    return {"rope_parameters": write_layered_rope(model_config)["rope_parameters"]}


def _read_window(raw: Raw) -> Values:
    """transformers counts the query itself; where all positions fit there is no window."""
    window, positions = raw.get("sliding_window"), raw["max_position_embeddings"]
    return {"window_size": None if window is None or window >= positions else window - 1}


def _write_window(model_config: ModelConfig) -> Values:
    return {
        "sliding_window": None if model_config.window_size is None else model_config.window_size + 1
    }


def _window_layers(raw: Raw) -> tuple[bool, ...]:
    num_layers, skip = raw["num_hidden_layers"], raw["sliding_window_pattern"]
    first = raw.get("first_full_attention", -1)
    full = {*range(first % skip, num_layers, skip), *raw.get("full_layers", ())}
    kinds = raw.get("layer_types") or [
        FULL if layer in full else SLIDING for layer in range(num_layers)
    ]
    return layers_of(SLIDING, kinds, num_layers=num_layers)


def _read_layer_windows(raw: Raw) -> Values:
    layers, size = _window_layers(raw), raw["sliding_window"]
    if size is None or not any(layers):
        return {}
    return {
        "window_size": size - 1,
        "window_attn_skip_freq": "0" if all(layers) else write_pattern(layers),
    }


def _write_layer_windows(model_config: ModelConfig) -> Values:
    window = model_config.window_size
    return {
        "layer_types": [
            SLIDING if has_window else FULL for has_window in model_config.window_layers
        ],
        # no layer reads it without a window
        "sliding_window": 4096 if window is None else window + 1,
    }


def _read_rope_in_windows(raw: Raw) -> Values:
    """EXAONE: in a model with a window, only layers that have it have rotary positions."""
    without = (
        ()
        if raw["sliding_window"] is None
        else tuple(not has_window for has_window in _window_layers(raw))
    )
    return {"no_rope_freq": write_pattern(without) if any(without) else "0"}


def _write_rope_in_windows(model_config: ModelConfig) -> Values:
    return (
        {}
        if any(model_config.no_rope_layers) or any(model_config.window_layers)
        else {"sliding_window": None}
    )


def _read_rope_or_none(raw: Raw) -> Values:
    """OLMo Hybrid has no rotary positions where their entry, or their base or type in it, is null."""
    rope = raw.get("rope_parameters", {})
    has_none = rope is None or any(rope.get(entry, "") is None for entry in NO_ROPE)
    return {"position_embedding_type": "none"} if has_none else read_rope(raw)


def _write_rope_or_none(model_config: ModelConfig) -> Values:
    return write_rope(model_config) if model_config.has_rope else {"rope_parameters": NO_ROPE}


def _read_rope_or_default(raw: Raw) -> Values:
    has_rope = raw.get("rope_parameters") or raw.get("rope_scaling")
    return read_rope(
        raw if has_rope else {**raw, "rope_parameters": raw["rope_parameters_of_none"]}
    )


def _write_rope_or_default(model_config: ModelConfig) -> Values:
    entries = write_rope(model_config)
    if entries["rope_scaling"] is None:  # else transformers takes its own
        entries["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": model_config.rotary_base,
        }
    return entries


def _read_mistral_rope(raw: Raw) -> Values:
    """YaRN with factors of queries by position; the share of the rotated channels of MLA is that of
    its sizes.
    """
    rope = dict(
        raw.get("rope_parameters") or raw.get("rope_scaling") or raw["rope_parameters_of_none"]
    )
    kind = rope.get("rope_type", rope.get("type"))
    if kind != "yarn":
        reject("rope_type", kind, instead="yarn")
    if rope.get("partial_rotary_factor") is not None and "qk_rope_head_dim" in raw:
        share = raw["qk_rope_head_dim"] / (raw["qk_nope_head_dim"] + raw["qk_rope_head_dim"])
        if rope.pop("partial_rotary_factor") != share:
            reject("partial_rotary_factor", "another share", instead=f"{share:.6g}")
    beta = float(rope.pop("llama_4_scaling_beta", 0.0))
    values = read_rope({**raw, "rope_parameters": rope, "rope_scaling": None})
    return values | ({"yarn.query_scaling_beta": beta} if beta else {})


def _write_mistral_rope(model_config: ModelConfig) -> Values:
    """In the newer format alone: transformers takes its default where it has no `rope_parameters`."""
    entries, yarn, mla = write_rope(model_config), model_config.yarn, model_config.mla
    rope = {**(entries["rope_scaling"] or {}), "rope_theta": entries["rope_theta"]}
    rope["llama_4_scaling_beta"] = 0.0 if yarn is None else yarn.query_scaling_beta
    if mla is not None:
        rope["partial_rotary_factor"] = mla.qk_pos_emb_head_dim / (
            mla.qk_head_dim + mla.qk_pos_emb_head_dim
        )
    return {"rope_parameters": rope}


def _read_hunyuan_rope(raw: Raw) -> Values:
    """An `alpha` raises the base of the frequencies, whatever the length: it is written as that
    base.
    """
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    if not (alpha := rope.get("alpha")) or rope.get("rope_type", rope.get("type")) != "dynamic":
        return read_rope(raw)
    values, head_dim = (
        read_rope({**raw, "rope_parameters": rope | {"rope_type": "default"}}),
        raw["head_dim"],
    )
    return values | {"rotary_base": values["rotary_base"] * alpha ** (head_dim / (head_dim - 2))}


def _read_phi3_rope(raw: Raw) -> Values:
    kind = (raw.get("rope_parameters") or raw.get("rope_scaling") or {}).get("rope_type", "default")
    if kind != "default":  # transformers takes every other kind for longrope
        reject("rope_type", kind, instead="default")
    return read_rope(raw, has_partial=True)


def _read_no_rope(raw: Raw) -> Values:
    """SmolLM3's no_rope_layers has a 0 for a layer without rotary positions."""
    if raw.get("use_sliding_window") and raw.get("sliding_window") is not None:
        reject("use_sliding_window", True, instead="false")
    layers, interval = raw.get("no_rope_layers"), int(raw.get("no_rope_layer_interval", 4))
    if not layers:
        layers = [int((layer + 1) % interval != 0) for layer in range(raw["num_hidden_layers"])]
    without = tuple(not has_rope for has_rope in layers[: raw["num_hidden_layers"]])
    return {"no_rope_freq": write_pattern(without) if any(without) else "0"}


def _write_no_rope(model_config: ModelConfig) -> Values:
    layers = [int(not without) for without in model_config.no_rope_layers]
    return {
        "no_rope_layers": layers,
        "layer_types": [FULL] * len(layers),
        "use_sliding_window": False,
    }


def _read_llama4(raw: Raw) -> Values:
    """Layers with rotary positions attend within chunks, unless config.json lists those that do."""
    layers, step = range(raw["num_hidden_layers"]), raw["interleave_moe_layer_step"]
    values = _read_no_rope(raw) | {"moe.shared_expert_intermediate_size": raw["intermediate_size"]}
    without = read_layer_pattern("no_rope_freq", values["no_rope_freq"], num_layers=len(layers))
    kinds = raw.get("layer_types") or [FULL if each else CHUNKED for each in without]
    chunked = layers_of(CHUNKED, kinds, num_layers=len(layers))
    with_experts = layers[step - 1 :: step] if raw.get("moe_layers") is None else raw["moe_layers"]
    values |= expert_layers(tuple(layer in with_experts for layer in layers))
    if any(chunked):
        values |= {
            "attention_chunk_size": raw["attention_chunk_size"],
            "window_attn_skip_freq": write_pattern(chunked),
        }
    return values if raw["attn_temperature_tuning"] else values | {"attn_scale": 0.0}


def _write_llama4(model_config: ModelConfig) -> Values:
    return {
        **_write_no_rope(model_config),
        # transformers divides by it in any case
        "attention_chunk_size": model_config.attention_chunk_size or 8192,
        "attn_temperature_tuning": model_config.attn_scale > 0,
        "layer_types": [
            CHUNKED if is_chunked else FULL for is_chunked in model_config.window_layers
        ],
        "moe_layers": [
            layer for layer, has_experts in enumerate(model_config.moe_layers) if has_experts
        ],
    }


POSITION_PARTS: dict[str, Part] = {
    "rope": Part(read_rope, write_rope),
    "partial_rope": Part(partial(read_rope, has_partial=True), write_rope),
    "layered_rope": Part(read_layered_rope, write_layered_rope),
    "partial_layered_rope": Part(
        partial(read_layered_rope, has_partial=True), _write_partial_layered_rope
    ),
    "rope_or_default": Part(_read_rope_or_default, _write_rope_or_default),
    "phi3_rope": Part(_read_phi3_rope, write_rope),
    "no_rope_layers": Part(_read_no_rope, _write_no_rope),
    "llama4": Part(_read_llama4, _write_llama4),
    "mistral_rope": Part(_read_mistral_rope, _write_mistral_rope),
    "hunyuan_rope": Part(_read_hunyuan_rope, write_rope),
    "window": Part(_read_window, _write_window),
    "layer_windows": Part(_read_layer_windows, _write_layer_windows),
    "rope_or_none": Part(_read_rope_or_none, _write_rope_or_none),
    "rope_in_windows": Part(_read_rope_in_windows, _write_rope_in_windows),
}
