"""Rotary positions in config.json: `read_rope`, `write_rope`.

Read in both existing formats (`rope_theta` + `rope_scaling` before transformers 5, `rope_parameters` since) and written
in the older one, which every version reads. Scaling kinds: `default`, `linear`, `llama3`, `yarn`.

Models with windows in some layers may have another base in those (`read_layered_rope`, `write_layered_rope`).
"""

import math
from collections.abc import Mapping
from typing import Any

from nanotrain.config.config import ModelConfig, PositionEmbedding
from nanotrain.config.derive import rotary_mscale
from nanotrain.interop.hf.reject import reject


def read_rope(raw: Mapping[str, Any], *, has_partial: bool = False) -> dict[str, Any]:
    """The fields of ModelConfig about rotary positions.

    Args:
        raw: the parsed config.json.
        has_partial: whether the family reads `partial_rotary_factor`, the rotated share of the channels.

    Raises:
        HuggingFaceError: an unsupported kind of scaling, or entries that are no numbers.
    """
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    base = rope.get("rope_theta", raw.get("rope_theta", 10000.0))
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not has_partial and partial not in (1.0, None):
        reject("partial_rotary_factor", partial, instead="1.0")
    if kind not in KINDS:
        reject("rope_type", kind, instead=f"one of {', '.join(KINDS)}")
    fields = {"rotary_base": float(base), "rotary_percent": 1.0 if partial is None else float(partial)}
    return fields | KINDS[kind](rope, raw)


def write_rope(model_config: ModelConfig) -> dict[str, Any]:
    """Entries of config.json about rotary positions."""
    scaling: dict[str, Any] | None = None
    if model_config.position_embedding_type is PositionEmbedding.yarn:
        scaling = {
            "rope_type": "yarn",
            "type": "yarn",
            "factor": model_config.rotary_scaling_factor,
            "beta_fast": model_config.beta_fast,
            "beta_slow": model_config.beta_slow,
            "original_max_position_embeddings": model_config.original_max_position_embeddings,
        }
        if not model_config.yarn_correction_range_round_to_int:
            scaling["truncate"] = False
        if model_config.mscale_all_dim > 0:
            scaling |= {"mscale": model_config.mscale, "mscale_all_dim": model_config.mscale_all_dim}
    elif model_config.use_rope_scaling:
        scaling = {
            "rope_type": "llama3",
            "factor": model_config.rope_scaling_factor,
            "low_freq_factor": model_config.rope_low_freq_factor,
            "high_freq_factor": model_config.rope_high_freq_factor,
            "original_max_position_embeddings": model_config.rope_original_max_positions,
        }
    elif model_config.rotary_seq_len_interpolation_factor != 1:
        scaling = {"rope_type": "linear", "factor": model_config.rotary_seq_len_interpolation_factor}
    partial = {} if model_config.rotary_percent == 1 else {"partial_rotary_factor": model_config.rotary_percent}
    return {"rope_scaling": scaling, "rope_theta": model_config.rotary_base} | partial


def read_layered_rope(raw: Mapping[str, Any], *, base: float, local_base: float | None) -> dict[str, Any]:
    """The same of a model whose layers with a window have unscaled positions and may have another base.

    Args:
        raw: the parsed config.json.
        base: where it has none.
        local_base: where it has none for layers with a window; None for the base of the others.
    """
    stored = raw.get("rope_parameters") or {}
    is_layered = bool({"full_attention", "sliding_attention"} & stored.keys())
    full, local = (
        (stored.get(f"{kind}_attention") or {} for kind in ("full", "sliding")) if is_layered else (stored, {})
    )
    if local.get("rope_type", "default") != "default":
        reject("rope_type of sliding_attention", local["rope_type"], instead="default")
    fields = read_rope({**raw, "rope_theta": raw.get("rope_theta", base), "rope_parameters": full})
    default = fields["rotary_base"] if local_base is None else raw.get("rope_local_base_freq", local_base)
    return fields | {"rotary_base_local": float(local.get("rope_theta", default))}


def write_layered_rope(model_config: ModelConfig) -> dict[str, Any]:
    """Entries of config.json about rotary positions of such a model, in both formats."""
    entries, base = write_rope(model_config), model_config.rotary_base
    local = base if model_config.rotary_base_local is None else model_config.rotary_base_local
    full = {**(entries["rope_scaling"] or {"rope_type": "default"}), "rope_theta": base}
    layered = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": local}}
    return entries | {"rope_local_base_freq": local, "rope_parameters": layered}


def _read_default(rope: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def _read_linear(rope: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"rotary_seq_len_interpolation_factor": _number(rope, "factor", kind="linear")}


def _read_llama3(rope: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    names = ("factor", "low_freq_factor", "high_freq_factor")
    factor, low, high = (_number(rope, name, kind="llama3") for name in names)
    return {
        "use_rope_scaling": True,
        "rope_scaling_factor": factor,
        "rope_low_freq_factor": low,
        "rope_high_freq_factor": high,
        "rope_original_max_positions": _original(rope, raw),
    }


def _read_yarn(rope: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "position_embedding_type": PositionEmbedding.yarn,
        "rotary_scaling_factor": _number(rope, "factor", kind="yarn"),
        "beta_fast": float(rope.get("beta_fast") or 32),
        "beta_slow": float(rope.get("beta_slow") or 1),
        "original_max_position_embeddings": _original(rope, raw),
        "yarn_correction_range_round_to_int": bool(rope.get("truncate", True)),
    }
    if rope.get("mscale") and rope.get("mscale_all_dim"):  # transformers ignores one without the other
        fields |= {"mscale": float(rope["mscale"]), "mscale_all_dim": float(rope["mscale_all_dim"])}
    expected = rotary_mscale(ModelConfig(**fields))
    length = rope.get("attention_factor")
    if length is not None and not math.isclose(length, expected, rel_tol=1e-6):
        reject("attention_factor of its yarn rotary scaling", length, instead=f"null or {expected:.6g}")
    return fields


def _number(rope: Mapping[str, Any], name: str, *, kind: str) -> float:
    value = rope.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        reject(f"{name} of its {kind} rotary scaling", value, instead="a number")
    return float(value)


def _original(rope: Mapping[str, Any], raw: Mapping[str, Any]) -> int:
    return int(rope.get("original_max_position_embeddings") or raw.get("max_position_embeddings", 2048))


KINDS = {"default": _read_default, "linear": _read_linear, "llama3": _read_llama3, "yarn": _read_yarn}
