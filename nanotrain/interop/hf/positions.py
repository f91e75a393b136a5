"""Entries of config.json about rotary positions, as parts (parts.py).

    read_rope, write_rope                   rotary positions of all layers
    read_layered_rope, write_layered_rope   others in layers with a window

They are read in both existing formats (`rope_theta` + `rope_scaling` before transformers 5,
`rope_parameters` since) and written in the older one, which every version reads.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from nanotrain.config.model import ModelConfig, YarnConfig
from nanotrain.config.schema import value_of, with_values
from nanotrain.interop.hf.canonical import write_layers
from nanotrain.interop.hf.config_class import pass_over
from nanotrain.interop.hf.layer_types import FULL
from nanotrain.interop.hf.layout import Part, Raw, Values, reject
from nanotrain.interop.hf.tables import read_tables
from nanotrain.interop.hf.windows import SLIDING, read_window_layers

# entries that are null without rotary positions
NO_ROPE = {"rope_type": None, "rope_theta": None}
ROPE_KINDS: dict[str, dict[str, str]] = read_tables()["rope_kinds"]


def _stored_rope(raw: Raw) -> dict[str, Any]:
    """The entries of the newer format, or of the older one."""
    return dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})


def _rope_kind(rope: Raw) -> Any:
    return rope.get("rope_type", rope.get("type"))


def read_rope(raw: Raw, *, has_partial: bool = False) -> Values:
    """The values of the model section about rotary positions.

    Args:
        raw: the parsed config.json.
        has_partial: whether the family reads `partial_rotary_factor`, the rotated fraction of the
            channels.

    Raises:
        HuggingFaceError: an unsupported kind of scaling, or entries that are no numbers.
    """
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    if FULL in rope and "rope_type" not in rope:
        reject("rope_parameters", "a table per kind of layer", instead="one table for all layers")
    fraction = _read_rotated_fraction(raw, rope)
    if not has_partial and fraction not in (1.0, None):
        reject("partial_rotary_factor", fraction, instead="1.0")
    if rope.get("llama_4_scaling_beta"):
        reject("llama_4_scaling_beta", rope["llama_4_scaling_beta"], instead="0")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_KINDS:
        reject("rope_type", kind, instead=f"one of {', '.join(ROPE_KINDS)}")
    base: Any = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    values: Values = {
        "rotary_base": float(base),
        "rotary_percent": 1.0 if fraction is None else float(fraction),
    }
    max_positions = raw.get("max_position_embeddings", 2048)
    values |= _read_scaling(rope, kind, max_positions=max_positions)
    if kind == "llama3":
        values["use_rope_scaling"] = True
    if kind == "yarn":
        has_lone_factor = rope.get("mscale_all_dim") and not rope.get("mscale")
        if has_lone_factor and "kv_lora_rank" in raw:  # of scores of MLA, and not of positions
            instead = "a number beside mscale_all_dim"
            reject("mscale of its yarn rotary scaling", rope.get("mscale"), instead=instead)
        values |= _read_yarn(rope, values)
    return values


def _read_rotated_fraction(raw: Raw, rope: Raw) -> Any:
    """The rotated fraction of the channels; None where config.json has none."""
    fraction = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if fraction is None and raw.get("rotary_dim") is not None:  # MiniMax-M2, as published
        return raw["rotary_dim"] / raw["head_dim"]
    return fraction


def _read_scaling(rope: Raw, kind: str, *, max_positions: Any) -> Values:
    """The numbers of a kind of scaling."""
    defaults = {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": max_positions,
    }
    values: Values = {}
    for entry, key in ROPE_KINDS[kind].items():
        value = rope.get(entry)
        if value is None or (entry in ("beta_fast", "beta_slow") and not value):
            value = defaults.get(entry)
        if isinstance(value, bool) or not isinstance(value, int | float):
            reject(f"{entry} of its {kind} rotary scaling", value, instead="a number")
        values[key] = value
    return values


def _read_yarn(rope: Raw, values: Values) -> Values:
    """Settings of YaRN besides the numbers in `values`."""
    yarn_values: Values = {
        "position_embedding_type": "yarn",
        "yarn.correction_range_round_to_int": bool(rope.get("truncate", True)),
    }
    # transformers ignores one without the other
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        yarn_values["yarn.mscale"] = float(rope["mscale"])
        yarn_values["yarn.mscale_all_dim"] = float(rope["mscale_all_dim"])
    yarn: YarnConfig = with_values(ModelConfig(), values | yarn_values).yarn
    expected = yarn.rotary_mscale
    factor = rope.get("attention_factor")
    if factor is not None and not math.isclose(factor, expected, rel_tol=1e-6):
        entry = "attention_factor of its yarn rotary scaling"
        reject(entry, factor, instead=f"null or {expected:.6g}")
    return yarn_values


def write_rope(model_config: ModelConfig) -> Values:
    """Entries about rotary positions."""
    entries: Values = {
        "rope_scaling": _write_scaling(model_config),
        "rope_theta": model_config.rotary_base,
    }
    if model_config.rotary_percent != 1:
        entries["partial_rotary_factor"] = model_config.rotary_percent
    return entries


def _write_scaling(model_config: ModelConfig) -> Values | None:
    """The `rope_scaling` entry of YaRN, Llama 3.1 or linear scaling; None without any."""
    yarn = model_config.yarn
    if yarn is not None:
        kind = "yarn"
    elif model_config.use_rope_scaling:
        kind = "llama3"
    elif model_config.rotary_seq_len_interpolation_factor != 1:
        kind = "linear"
    else:
        return None
    scaling: Values = {"rope_type": kind}
    for entry, key in ROPE_KINDS[kind].items():
        scaling[entry] = value_of(model_config, key)
    if yarn is not None:
        scaling["type"] = "yarn"
        if not yarn.correction_range_round_to_int:
            scaling["truncate"] = False
        if yarn.mscale_all_dim > 0:
            scaling["mscale"] = yarn.mscale
            scaling["mscale_all_dim"] = yarn.mscale_all_dim
    return scaling


def read_layered_rope(raw: Raw, *, has_partial: bool = False) -> Values:
    """Read rotary positions of a model whose windowed layers have a base of their own, unscaled."""
    full = raw.get("rope_parameters") or {}
    local: Raw = {}
    if FULL in full or SLIDING in full:
        local = full.get(SLIDING) or {}
        full = full.get(FULL) or {}
    if local.get("rope_type", "default") != "default":
        reject("rope_type of sliding_attention", local["rope_type"], instead="default")
    values = read_rope(raw | {"rope_parameters": full}, has_partial=has_partial)
    fraction = values["rotary_percent"]
    local_fraction: Any = local.get("partial_rotary_factor", fraction)
    if has_partial:
        values["window_rotary_percent"] = float(local_fraction)
    elif local_fraction != fraction:
        entry = "partial_rotary_factor of sliding_attention"
        reject(entry, local_fraction, instead=str(fraction))
    base = raw.get("rope_local_base_freq", values["rotary_base"])
    local_base: Any = local.get("rope_theta", base)
    values["rotary_base_local"] = float(local_base)
    return values


def write_layered_rope(model_config: ModelConfig) -> Values:
    """Write rotary positions whose base differs in windowed layers, in both formats."""
    entries = write_rope(model_config)
    base = model_config.rotary_base
    local_base = model_config.rotary_base_local
    if local_base is None:
        local_base = base
    percent = model_config.rotary_percent
    local_percent = model_config.window_rotary_percent or percent
    full = {"rope_type": "default", "partial_rotary_factor": percent}
    local = {"rope_type": "default", "partial_rotary_factor": local_percent}
    scaling = entries["rope_scaling"] or {}
    entries["rope_local_base_freq"] = local_base
    entries["rope_parameters"] = {
        FULL: full | scaling | {"rope_theta": base},
        SLIDING: local | {"rope_theta": local_base},
    }
    return entries


def _read_partial_layered_rope(raw: Raw) -> Values:
    """MiMo-V2: transformers completes no table of its layers, so each has to be there and whole."""
    tables = raw.get("rope_parameters") or {}
    for kind in (FULL, SLIDING):
        if "partial_rotary_factor" not in tables.get(kind, {}):
            entry = f"partial_rotary_factor of {kind} in rope_parameters"
            reject(entry, None, instead="a number")
    return read_layered_rope(raw, has_partial=True)


def _write_partial_layered_rope(model_config: ModelConfig) -> Values:
    """Only `rope_parameters`, where transformers does not convert the older entries."""
    return {"rope_parameters": write_layered_rope(model_config)["rope_parameters"]}


def _read_layer_bases(raw: Raw) -> Values:
    """Granite with windows: a rotary base per layer, 0 for a layer without rotary positions."""
    bases = raw["layer_rope_theta"]
    if bases is None:
        return {}
    if not any(bases):
        return {"position_embedding_type": "none"}
    windows = [False] * len(bases)
    if raw["sliding_window"] is not None:
        windows = list(read_window_layers(raw))
    full = _one_base(bases, windows, has_window=False)
    local = _one_base(bases, windows, has_window=True)
    values: Values = {"no_rope_freq": write_layers([not base for base in bases])}
    values["rotary_base"] = full or local
    if full and local and full != local:
        kind = _stored_rope(raw).get("rope_type", "default")
        if kind != "default":
            reject("layer_rope_theta", bases, instead=f"one base with rope_type {kind}")
        values["rotary_base_local"] = local
    return values


def _one_base(bases: Sequence[float], windows: Sequence[bool], *, has_window: bool) -> float:
    """The rotary base of the layers with a window, or of the others; 0 where none rotates."""
    found = {float(base) for base, other in zip(bases, windows, strict=True) if other == has_window}
    found.discard(0.0)
    if len(found) > 1:
        reject("layer_rope_theta", sorted(found), instead="one base for all layers of a kind")
    return found.pop() if found else 0.0


def _write_layer_bases(model_config: ModelConfig) -> Values:
    """The rotary base of every layer; 0 for a layer without rotary positions."""
    if not model_config.has_rope:
        return {"layer_rope_theta": [0.0] * model_config.num_layers}
    base = model_config.rotary_base
    local = model_config.rotary_base_local or base
    bases = []
    for without, has_window in zip(
        model_config.no_rope_layers, model_config.window_layers, strict=True
    ):
        base_of_kind = local if has_window else base
        bases.append(0.0 if without else base_of_kind)
    return {"layer_rope_theta": bases}


def _read_rope_or_none(raw: Raw) -> Values:
    """OLMo Hybrid: no rotary positions where their base is null."""
    rope = raw.get("rope_parameters") or {}
    if rope.get("rope_theta", 0.0) is None:
        return {"position_embedding_type": "none"}
    return read_rope(raw)


def _write_rope_or_none(model_config: ModelConfig) -> Values:
    return write_rope(model_config) if model_config.has_rope else {"rope_parameters": NO_ROPE}


def _read_rope_or_default(raw: Raw) -> Values:
    if not _stored_rope(raw):
        raw = raw | {"rope_parameters": raw["rope_parameters_of_none"]}
    return read_rope(raw)


def _write_rope_or_default(model_config: ModelConfig) -> Values:
    """Rotary positions with a table in any case."""
    entries = write_rope(model_config)
    if entries["rope_scaling"] is None:
        # without an entry transformers takes the scaling of its own default
        base = model_config.rotary_base
        entries["rope_parameters"] = {"rope_type": "default", "rope_theta": base}
    return entries


def _read_mistral_rope(raw: Raw) -> Values:
    """YaRN with factors of queries by position; with MLA its sizes give the rotated fraction."""
    rope = _stored_rope(raw) or dict(raw["rope_parameters_of_none"])
    kind = _rope_kind(rope)
    if kind != "yarn":
        reject("rope_type", kind, instead="yarn")
    if rope.get("partial_rotary_factor") is not None and "qk_rope_head_dim" in raw:
        rotated = raw["qk_rope_head_dim"]
        fraction = rotated / (raw["qk_nope_head_dim"] + rotated)
        if rope.pop("partial_rotary_factor") != fraction:
            reject("partial_rotary_factor", "another share", instead=f"{fraction:.6g}")
    beta = float(rope.pop("llama_4_scaling_beta", 0.0))
    values = read_rope(raw | {"rope_parameters": rope, "rope_scaling": None})
    if beta:
        values["yarn.query_scaling_beta"] = beta
    return values


def _write_mistral_rope(model_config: ModelConfig) -> Values:
    """Mistral: only `rope_parameters`, without which transformers takes its default."""
    yarn = model_config.yarn
    mla = model_config.mla
    rope = _write_scaling(model_config) or {}
    rope["rope_theta"] = model_config.rotary_base
    rope["llama_4_scaling_beta"] = 0.0 if yarn is None else yarn.query_scaling_beta
    if mla is not None:
        rotated = mla.qk_pos_emb_head_dim
        rope["partial_rotary_factor"] = rotated / (mla.qk_head_dim + rotated)
    return {"rope_parameters": rope}


def _read_hunyuan_rope(raw: Raw) -> Values:
    """An `alpha` raises the rotary base, whatever the length; written as the raised base."""
    rope = _stored_rope(raw)
    alpha = rope.get("alpha")
    if not alpha or _rope_kind(rope) != "dynamic":
        return read_rope(raw)
    rope["rope_type"] = "default"
    values = read_rope(raw | {"rope_parameters": rope})
    head_dim = raw["head_dim"]
    values["rotary_base"] *= alpha ** (head_dim / (head_dim - 2))
    return values


def _read_llama4_rope(raw: Raw) -> Values:
    """Norms of queries and keys follow the rotation, and take back the factor of YaRN."""
    kind = _rope_kind(_stored_rope(raw))
    if kind == "yarn":
        reject("rope_type", kind, instead="default, linear or llama3")
    return read_rope(raw)


def _read_long_rope(raw: Raw, *, has_partial: bool = False) -> Values:
    """Plain positions or another kind, or LongRoPE: two factors per pair, and one of lengths."""
    rope = _stored_rope(raw)
    if _rope_kind(rope) != "longrope":
        return read_rope(raw, has_partial=has_partial)
    for entry in ("short_factor", "long_factor"):
        if not isinstance(rope.get(entry), list):
            reject(f"{entry} of its longrope rotary scaling", rope.get(entry), instead="a list")
    plain = rope | {"rope_type": "default", "type": "default"}
    values = read_rope(raw | {"rope_parameters": plain}, has_partial=has_partial)
    original = rope.get("original_max_position_embeddings") or raw["max_position_embeddings"]
    factor = rope.get("factor") or raw["max_position_embeddings"] / original
    length = rope.get("attention_factor")
    if length is None:
        growth = math.log(factor) / math.log(original) if factor > 1 else 0.0
        length = math.sqrt(1 + growth)
    values["position_embedding_type"] = "longrope"
    values["longrope.short_factor"] = rope["short_factor"]
    values["longrope.long_factor"] = rope["long_factor"]
    values["longrope.original_max_positions"] = original
    values["longrope.attention_factor"] = length
    return values


def _write_long_rope(model_config: ModelConfig) -> Values:
    """LongRoPE: two factors per pair, and the factor on lengths."""
    longrope = model_config.longrope
    entries = write_rope(model_config)
    if longrope is not None:
        original = longrope.original_max_positions
        entries["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": longrope.short_factor,
            "long_factor": longrope.long_factor,
            "original_max_position_embeddings": original,
            "factor": max(1.0, model_config.max_position_embeddings / original),
            "attention_factor": longrope.attention_factor,
        }
    return entries


def _read_phi3_rope(raw: Raw) -> Values:
    """Phi-3: plain rotary positions or LongRoPE."""
    kind = _stored_rope(raw).get("rope_type", "default")
    if kind not in ("default", "longrope"):  # transformers takes every other kind for longrope
        reject("rope_type", kind, instead="default or longrope")
    pass_over(raw, "original_max_position_embeddings")  # the class puts it into the table
    return _read_long_rope(raw, has_partial=True)


def _write_phi3_rope(model_config: ModelConfig) -> Values:
    """LongRoPE, with the original length outside of the table too."""
    entries = _write_long_rope(model_config)
    if model_config.longrope is not None:
        original = model_config.longrope.original_max_positions
        entries["original_max_position_embeddings"] = original
    return entries


POSITION_PARTS: dict[str, Part] = {
    "rope": Part(read_rope, write_rope),
    "partial_rope": Part(partial(read_rope, has_partial=True), write_rope),
    "layered_rope": Part(read_layered_rope, write_layered_rope),
    "partial_layered_rope": Part(_read_partial_layered_rope, _write_partial_layered_rope),
    "rope_by_kind": Part(read_layered_rope, _write_partial_layered_rope),
    "layer_bases": Part(_read_layer_bases, _write_layer_bases),
    "rope_or_default": Part(_read_rope_or_default, _write_rope_or_default),
    "rope_or_none": Part(_read_rope_or_none, _write_rope_or_none),
    "mistral_rope": Part(_read_mistral_rope, _write_mistral_rope),
    "hunyuan_rope": Part(_read_hunyuan_rope, write_rope),
    "llama4_rope": Part(_read_llama4_rope, write_rope),
    "long_rope": Part(_read_long_rope, _write_long_rope),
    "phi3_rope": Part(_read_phi3_rope, _write_phi3_rope),
}
