"""Entries of config.json about kinds of layers, as parts (parts.py) of hybrid families.

nemotron_h_layers   one letter per layer, which is Mamba-2, attention, an MLP or experts alone
granite_layers      Mamba-2 in place of attention in some layers; experts in all layers or in none
lfm2_layers         short convolutions in place of attention in some layers
dense_first_layers  experts in all layers but the first ones
"""

import math

from nanotrain.config.model import ModelConfig, MoEConfig
from nanotrain.config.notation import write_pattern
from nanotrain.interop.hf.canonical import resolved
from nanotrain.interop.hf.layout import Part, Raw, Values, reject
from nanotrain.quantities import count_of, round_up
from nanotrain.spec.shape import ModelShape

# Names of transformers 5 and those that every version reads.
KINDS = {"linear_attention": "mamba", "full_attention": "attention"}
LETTERS = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}


def _kinds(raw: Raw, default: str, *, known: tuple[str, ...]) -> list[str]:
    """The kind of every layer; `default` where config.json names none."""
    kinds = raw.get("layer_types") or raw.get("layers_block_type") or [default] * raw["num_hidden_layers"]
    kinds = [KINDS.get(kind, kind) for kind in kinds]
    if unknown := [kind for kind in kinds if kind not in known]:
        reject("layer_types", unknown[0], instead=f"one of {', '.join(known)}")
    return kinds


def _linear(kind: str, kinds: list[str], *, num_layers: int) -> Values:
    """The layers of a kind of linear attention; the others have softmax attention."""
    if len(kinds) != num_layers:
        reject("layer_types", f"of {count_of(len(kinds), 'layer')}", instead=f"of {num_layers}")
    layers = tuple(each != "attention" for each in kinds)
    values: Values = {"linear_attention_type": kind if any(layers) else None}
    return values | ({"linear_attention_freq": write_pattern(layers)} if any(layers) and not all(layers) else {})


def _read_pattern(raw: Raw) -> Values:
    pattern = raw["hybrid_override_pattern"]
    if raw.get("layers_block_type") or raw.get("layer_types"):
        pattern = "".join(LETTERS[kind] for kind in _kinds(raw, "", known=tuple(LETTERS)))
    if unknown := set(pattern) - {*LETTERS.values()}:
        reject("hybrid_override_pattern", sorted(unknown)[0], instead=f"one of {', '.join(LETTERS.values())}")
    experts = raw["n_routed_experts"] if "E" in pattern else None
    return {"hybrid_layer_pattern": pattern, "num_layers": len(pattern), "moe.num_experts": experts}


def _write_pattern(model_config: ModelConfig) -> Values:
    moe = model_config.moe or MoEConfig(num_experts=0)
    pattern = (model_config.hybrid_layer_pattern or "").replace("|", "")
    return {"hybrid_override_pattern": pattern, "n_routed_experts": moe.num_experts}


def _read_granite(raw: Raw) -> Values:
    kinds, shared = _kinds(raw, "mamba", known=("mamba", "attention")), raw["shared_intermediate_size"]
    values = _linear("mamba2", kinds, num_layers=raw["num_hidden_layers"])
    if raw["position_embedding_type"] != "rope":
        values["position_embedding_type"] = "none"
    if raw["num_local_experts"]:
        values |= {"moe.num_experts": raw["num_local_experts"], "moe.ffn_hidden_size": raw["intermediate_size"]}
        values |= {"ffn_hidden_size": None, "moe.shared_expert_intermediate_size": shared}
    else:
        values["ffn_hidden_size"] = shared
    return values | (_read_granite_mamba(raw) if "mamba" in kinds else {})


def _read_granite_mamba(raw: Raw) -> Values:
    inner, heads = raw["mamba_expand"] * raw["hidden_size"], raw["mamba_n_heads"]
    head_dim = inner // heads if raw["mamba_d_head"] == "auto" else raw["mamba_d_head"]
    if heads * head_dim != inner:
        reject("mamba_d_head", head_dim, instead=f"{inner // heads}, mamba_expand * hidden_size / mamba_n_heads,")
    low, high = raw.get("time_step_limit") or (0.0, math.inf)
    if high not in (math.inf, {"__float__": "Infinity"}):
        reject("time_step_limit", [low, high], instead=f"[{low}, Infinity]")
    return {"mamba.num_heads": heads, "mamba.head_dim": head_dim, "mamba.time_step_min": low}


def _write_granite(model_config: ModelConfig) -> Values:
    shape, moe = ModelShape.of(model_config), resolved(model_config).moe
    has_mamba = "mamba2" in shape.mixers
    heads, head_dim = (shape.mamba_heads, shape.mamba.head_dim) if has_mamba else (1, shape.hidden_size)
    shared, low = shape.ffn_size if moe is None else moe.shared_expert_intermediate_size, shape.mamba.time_step_min
    return {
        "intermediate_size": shape.moe_ffn_size,
        "layer_types": ["mamba" if mixer == "mamba2" else "attention" for mixer in shape.mixers],
        "mamba_d_head": head_dim,
        "mamba_expand": heads * head_dim // shape.hidden_size,
        "mamba_n_heads": heads,
        "num_local_experts": 0 if moe is None else moe.num_experts,
        "position_embedding_type": "rope" if model_config.has_rope else "nope",
        "shared_intermediate_size": shared or 0,
        **({"time_step_limit": [low, math.inf]} if low else {}),
    }


def _read_lfm2(raw: Raw) -> Values:
    attention = raw.get("full_attn_idxs")
    default = ["attention" if attention is None or layer in attention else "conv" for layer in _indices(raw)]
    kinds = _kinds(raw if raw.get("layer_types") else {"layer_types": default}, "", known=("conv", "attention"))
    inner = raw["intermediate_size"]
    if raw["block_auto_adjust_ff_dim"]:
        adjusted = int(raw["block_ffn_dim_multiplier"] * int(2 * inner / 3))
        inner = round_up(adjusted, raw["block_multiple_of"])
    return _linear("short_conv", kinds, num_layers=raw["num_hidden_layers"]) | {"ffn_hidden_size": inner}


def _write_lfm2(model_config: ModelConfig) -> Values:
    kinds = ["conv" if mixer == "short_conv" else "full_attention" for mixer in model_config.mixers]
    attention = [layer for layer, kind in enumerate(kinds) if kind != "conv"]
    return {"block_auto_adjust_ff_dim": False, "full_attn_idxs": attention, "layer_types": kinds}


def expert_layers(layers: tuple[bool, ...]) -> Values:
    """The pattern of the layers with experts; where all have them, no layer has an MLP of `intermediate_size`."""
    return {"moe.layer_freq": write_pattern(layers)} | ({"ffn_hidden_size": None} if all(layers) else {})


def _read_dense_first(raw: Raw) -> Values:
    layers = tuple(layer >= raw["num_dense_layers"] for layer in _indices(raw))
    if not any(layers):
        reject("num_dense_layers", raw["num_dense_layers"], instead=f"below {len(layers)}")
    return expert_layers(layers)


def _write_dense_first(model_config: ModelConfig) -> Values:
    layers = model_config.moe_layers
    return {"num_dense_layers": layers.index(True) if any(layers) else len(layers)}


def _indices(raw: Raw) -> range:
    return range(raw["num_hidden_layers"])


LAYER_PARTS: dict[str, Part] = {
    "nemotron_h_layers": Part(_read_pattern, _write_pattern),
    "granite_layers": Part(_read_granite, _write_granite),
    "lfm2_layers": Part(_read_lfm2, _write_lfm2),
    "dense_first_layers": Part(_read_dense_first, _write_dense_first),
}
