"""Entries of config.json about kinds of layers, as parts (parts.py) of hybrid families.

nemotron_h_layers   one letter per layer, which is Mamba-2, attention, an MLP or experts alone
granite_layers      Mamba-2 in place of attention in some layers; experts in all layers or in none
falcon_h1_layers    Mamba-2 beside attention in all layers, and factors
lfm2_layers         short convolutions in place of attention in some layers
linear_layers       the gated delta rule in place of attention in some layers
kimi_linear         KDA in place of MLA in some layers, in entries of two kinds
dense_first_layers  experts in all layers but the first ones
dsa                 an indexer in every layer
mlp_layer_types     a list that says which layers have experts
mimo                more key/value heads in layers with a window; experts in all layers but the first
ernie_layers        experts in every Nth layer of a range
"""

import math
from collections.abc import Sequence
from functools import partial

from nanotrain.config.layer_kinds import LinearAttentionConfig
from nanotrain.config.model import ModelConfig, MoEConfig
from nanotrain.config.notation import read_hybrid_pattern, write_pattern
from nanotrain.interop.hf.canonical import resolved
from nanotrain.interop.hf.layout import Part, Raw, Values, reject
from nanotrain.quantities import count_of, round_up
from nanotrain.spec.shape import ModelShape

# Names of transformers 5 and those that every version reads.
FULL, LINEAR = "full_attention", "linear_attention"
KINDS = {"linear_attention": "mamba", "full_attention": "attention"}
LETTERS = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}


def _kinds(raw: Raw, default: str, *, known: tuple[str, ...]) -> list[str]:
    """The kind of every layer; `default` where config.json names none."""
    kinds = (
        raw.get("layer_types")
        or raw.get("layers_block_type")
        or [default] * raw["num_hidden_layers"]
    )
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
    return values | (
        {"linear_attention_freq": write_pattern(layers)} if any(layers) and not all(layers) else {}
    )


def _read_pattern(raw: Raw) -> Values:
    pattern = raw["hybrid_override_pattern"]
    if raw.get("layers_block_type") or raw.get("layer_types"):
        pattern = "".join(LETTERS[kind] for kind in _kinds(raw, "", known=tuple(LETTERS)))
    if unknown := set(pattern) - {*LETTERS.values()}:
        reject(
            "hybrid_override_pattern",
            sorted(unknown)[0],
            instead=f"one of {', '.join(LETTERS.values())}",
        )
    experts = raw["n_routed_experts"] if "E" in pattern else None
    return {"hybrid_layer_pattern": pattern, "num_layers": len(pattern), "moe.num_experts": experts}


def _write_pattern(model_config: ModelConfig) -> Values:
    moe = model_config.moe or MoEConfig(num_experts=0)
    pattern = read_hybrid_pattern(model_config.hybrid_layer_pattern or "")
    return {"hybrid_override_pattern": pattern, "n_routed_experts": moe.num_experts}


def _read_granite(raw: Raw) -> Values:
    kinds, shared = (
        _kinds(raw, "mamba", known=("mamba", "attention")),
        raw["shared_intermediate_size"],
    )
    values = _linear("mamba2", kinds, num_layers=raw["num_hidden_layers"])
    if raw["position_embedding_type"] != "rope":
        values["position_embedding_type"] = "none"
    if raw["num_local_experts"]:
        values |= {
            "moe.num_experts": raw["num_local_experts"],
            "moe.ffn_hidden_size": raw["intermediate_size"],
        }
        values |= {"ffn_hidden_size": None, "moe.shared_expert_intermediate_size": shared}
    else:
        values["ffn_hidden_size"] = shared
    return values | (
        _read_mamba(raw, raw["mamba_expand"] * raw["hidden_size"]) if "mamba" in kinds else {}
    )


def _read_mamba(raw: Raw, inner: int) -> Values:
    heads = raw["mamba_n_heads"]
    head_dim = inner // heads if raw["mamba_d_head"] == "auto" else raw["mamba_d_head"]
    if heads * head_dim != inner:
        reject("mamba_d_head", head_dim, instead=f"{inner // heads}, {inner} / mamba_n_heads,")
    low, high = raw.get("time_step_limit") or (0.0, math.inf)
    if high not in (math.inf, {"__float__": "Infinity"}):
        reject("time_step_limit", [low, high], instead=f"[{low}, Infinity]")
    return {"mamba.num_heads": heads, "mamba.head_dim": head_dim, "mamba.time_step_min": low}


def _write_granite(model_config: ModelConfig) -> Values:
    shape, moe = ModelShape.of(model_config), resolved(model_config).moe
    has_mamba = "mamba2" in shape.mixers
    heads, head_dim = (
        (shape.mamba_heads, shape.mamba.head_dim) if has_mamba else (1, shape.hidden_size)
    )
    shared, low = (
        shape.ffn_size if moe is None else moe.shared_expert_intermediate_size,
        shape.mamba.time_step_min,
    )
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


def _read_falcon_h1(raw: Raw) -> Values:
    """Factors on inputs are part of those on what linear layers without biases make of them."""
    inner, normed = (
        raw["mamba_d_ssm"] or raw["mamba_expand"] * raw["hidden_size"],
        raw["mamba_rms_norm"],
    )
    if normed and raw["mamba_norm_before_gate"]:
        reject("mamba_norm_before_gate", True, instead="false")
    of_input, of_mamba = raw["attention_in_multiplier"], raw["ssm_in_multiplier"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    gate, down = raw.get("mlp_multipliers") or (1.0, 1.0)
    return _read_mamba(raw, inner) | {
        "attention_output_multiplier": of_input * raw["attention_out_multiplier"],
        "logits_scaling": _rounded(1 / raw["lm_head_multiplier"]),
        "mamba.multipliers": [
            of_mamba * factor for factor in raw.get("ssm_multipliers") or [1.0] * 5
        ],
        "mlp_gate_multiplier": gate,
        "mlp_output_multiplier": down,
        "softmax_scale": _rounded(raw["key_multiplier"] * of_input**2 * head_dim**-0.5),
    }


def _write_falcon_h1(model_config: ModelConfig) -> Values:
    shape, scale, low = (
        ModelShape.of(model_config),
        model_config.softmax_scale,
        model_config.mamba.time_step_min,
    )
    return {
        "attention_out_multiplier": model_config.attention_output_multiplier,
        "key_multiplier": 1.0 if scale is None else _rounded(scale * shape.head_dim**0.5),
        "lm_head_multiplier": _rounded(1 / model_config.logits_scaling),
        "mamba_d_head": shape.mamba.head_dim,
        "mamba_d_ssm": shape.mamba_heads * shape.mamba.head_dim,
        "mamba_n_heads": shape.mamba_heads,
        "mamba_norm_before_gate": False,
        "mlp_multipliers": [model_config.mlp_gate_multiplier, model_config.mlp_output_multiplier],
        "ssm_multipliers": model_config.mamba.multipliers,
        **({"time_step_limit": [low, math.inf]} if low else {}),
    }


def _rounded(value: float) -> float:
    """Twelve digits: what is written reads back equal."""
    return float(f"{value:.12g}")


def _read_lfm2(raw: Raw) -> Values:
    attention = raw.get("full_attn_idxs")
    default = [
        "attention" if attention is None or layer in attention else "conv"
        for layer in _indices(raw)
    ]
    kinds = _kinds(
        raw if raw.get("layer_types") else {"layer_types": default}, "", known=("conv", "attention")
    )
    inner = raw["intermediate_size"]
    if raw["block_auto_adjust_ff_dim"]:
        adjusted = int(raw["block_ffn_dim_multiplier"] * int(2 * inner / 3))
        inner = round_up(adjusted, raw["block_multiple_of"])
    return _linear("short_conv", kinds, num_layers=raw["num_hidden_layers"]) | {
        "ffn_hidden_size": inner
    }


def _write_lfm2(model_config: ModelConfig) -> Values:
    kinds = ["conv" if mixer == "short_conv" else "full_attention" for mixer in model_config.mixers]
    attention = [layer for layer, kind in enumerate(kinds) if kind != "conv"]
    return {"block_auto_adjust_ff_dim": False, "full_attn_idxs": attention, "layer_types": kinds}


def layers_of(kind: str, kinds: Sequence[str], *, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer is of this kind, where the others have full attention."""
    if unknown := {*kinds} - {kind, FULL}:
        reject("layer_types", sorted(unknown)[0], instead=f"{kind} or {FULL}")
    if len(kinds) != num_layers:
        reject("layer_types", f"of {count_of(len(kinds), 'layer')}", instead=f"of {num_layers}")
    return tuple(other == kind for other in kinds)


def _read_linear_layers(raw: Raw) -> Values:
    num_layers, interval = raw["num_hidden_layers"], raw.get("full_attention_interval") or 4
    kinds = raw.get("layer_types") or [
        LINEAR if (layer + 1) % interval else FULL for layer in range(num_layers)
    ]
    layers = layers_of(LINEAR, kinds, num_layers=num_layers)
    if not any(layers):
        reject("layer_types", FULL, instead=f"{LINEAR} in some layer")
    return {"linear_attention_freq": "0" if all(layers) else write_pattern(layers)}


def _write_linear_layers(model_config: ModelConfig) -> Values:
    kind = model_config.linear_attention_type
    return {"layer_types": [LINEAR if mixer == kind else FULL for mixer in model_config.mixers]}


def _read_kimi_linear(raw: Raw) -> Values:
    """Layers, in the entries that Moonshot's code reads (numbers from 1) or in those of
    transformers.
    """
    linear, num_layers = raw.get("linear_attn_config") or {}, raw["num_hidden_layers"]
    for entry in ("gate_lower_bound", "use_full_rank_gate"):
        if linear.get(entry):
            reject(f"{entry} in linear_attn_config", linear[entry], instead="none")
    full = linear.get("full_attn_layers", range(5, num_layers + 1, 4))
    kinds = raw.get("layer_types") or [
        FULL if layer in full else LINEAR for layer in range(1, num_layers + 1)
    ]
    heads, width = (
        linear.get("num_heads", raw["linear_num_heads"]),
        linear.get("head_dim", raw["linear_head_dim"]),
    )
    values = _read_linear_layers({**raw, "layer_types": kinds})
    values |= _read_mlp_types(raw)
    values["linear_attention.conv_kernel_dim"] = linear.get(
        "short_conv_kernel_size", raw["linear_conv_kernel_dim"]
    )
    values |= {f"linear_attention.num_{name}_heads": heads for name in ("key", "value")}
    return values | {f"linear_attention.{name}_head_dim": width for name in ("key", "value")}


def _write_kimi_linear(model_config: ModelConfig) -> Values:
    linear, moe = (
        model_config.linear_attention or LinearAttentionConfig(),
        resolved(model_config).moe or MoEConfig(),
    )
    entries, numbered = (
        _write_linear_layers(model_config),
        [*enumerate(model_config.mixers, start=1)],
    )
    entries["linear_attn_config"] = {
        "full_attn_layers": [layer for layer, mixer in numbered if mixer != "kda"],
        "head_dim": linear.key_head_dim,
        "kda_layers": [layer for layer, mixer in numbered if mixer == "kda"],
        "num_heads": linear.num_key_heads,
        "short_conv_kernel_size": linear.conv_kernel_dim,
    }
    entries["num_expert_group"] = moe.router_num_groups or 1
    num_shared = (moe.shared_expert_intermediate_size or 0) // (moe.ffn_hidden_size or 1)
    return entries | {"num_shared_experts": num_shared}


def expert_layers(layers: tuple[bool, ...]) -> Values:
    """The pattern of the layers with experts; where all have them, no layer has an MLP of
    `intermediate_size`.
    """
    return {"moe.layer_freq": write_pattern(layers)} | (
        {"ffn_hidden_size": None} if all(layers) else {}
    )


def read_dense_first(raw: Raw, *, entry: str = "first_k_dense_replace") -> Values:
    """The layers with experts: all but the first ones, whose number is the entry."""
    layers = tuple(layer >= (raw[entry] or 0) for layer in _indices(raw))
    if not any(layers):
        reject(entry, raw[entry], instead=f"below {len(layers)}")
    return expert_layers(layers)


def write_dense_first(model_config: ModelConfig, *, entry: str = "first_k_dense_replace") -> Values:
    """The number of first layers without experts."""
    layers = model_config.moe_layers
    return {entry: layers.index(True) if any(layers) else len(layers)}


def _read_mlp_types(raw: Raw) -> Values:
    """A list that says which layers have experts, in place of the number of first layers without."""
    kinds = raw.get("mlp_layer_types")
    return {} if kinds is None else expert_layers(tuple(kind == "sparse" for kind in kinds))


def _write_mlp_types(model_config: ModelConfig) -> Values:
    return {
        "mlp_layer_types": [
            "sparse" if has_experts else "dense" for has_experts in model_config.moe_layers
        ]
    }


def _read_mimo(raw: Raw) -> Values:
    """Layers with a window have twice as many key/value heads; null is 1 in two factors."""
    kinds = raw.get("mlp_layer_types") or ["dense"] + ["sparse"] * (raw["num_hidden_layers"] - 1)
    window = raw.get("sliding_window_size")
    return {
        **_read_mlp_types({"mlp_layer_types": kinds}),
        "attention_output_multiplier": raw["attention_value_scale"] or 1.0,
        "moe.router_topk_scaling_factor": raw["routed_scaling_factor"] or 1.0,
        "window_query_groups": 2 * raw["num_key_value_heads"],
        **({} if window is None else {"window_size": window}),
    }


def _write_mimo(model_config: ModelConfig) -> Values:
    return {
        "attention_value_scale": model_config.attention_output_multiplier,
        **_write_mlp_types(model_config),
    }


def _read_ernie(raw: Raw) -> Values:
    step, first, last = (
        raw[f"moe_layer_{name}"] for name in ("interval", "start_index", "end_index")
    )
    last = raw["num_hidden_layers"] - 1 if last == -1 else last
    layers = tuple((layer + 1) % step == 0 and first <= layer <= last for layer in _indices(raw))
    if not any(layers):
        reject("moe_layer_start_index", first, instead=f"at most {last}")
    return expert_layers(layers)


def _write_ernie(model_config: ModelConfig) -> Values:
    with_experts = [
        layer for layer, has_experts in enumerate(model_config.moe_layers) if has_experts
    ] or [0]
    return {
        "moe_layer_interval": 1,
        "moe_layer_start_index": with_experts[0],
        "moe_layer_end_index": with_experts[-1],
    }


def _indices(raw: Raw) -> range:
    return range(raw["num_hidden_layers"])


def _read_dsa(raw: Raw) -> Values:
    """Every layer has an indexer of its own, and experts as `first_k_dense_replace` says."""
    number, num_dense = raw["num_hidden_layers"], raw["first_k_dense_replace"] or 0
    types: Values = {
        "layer_types": ["indexed_attention"] * number,
        "indexer_types": ["full"] * number,
    }
    types |= {"mlp_layer_types": ["dense"] * num_dense + ["sparse"] * (number - num_dense)}
    types |= {"index_topk_freq": 1, "index_topk_pattern": "F" * number}
    for entry, supported in types.items():
        if raw.get(entry, supported) not in (None, supported):
            reject(entry, raw[entry], instead=str(supported))
    return {}


LAYER_PARTS: dict[str, Part] = {
    "nemotron_h_layers": Part(_read_pattern, _write_pattern),
    "granite_layers": Part(_read_granite, _write_granite),
    "falcon_h1_layers": Part(_read_falcon_h1, _write_falcon_h1),
    "lfm2_layers": Part(_read_lfm2, _write_lfm2),
    "linear_layers": Part(_read_linear_layers, _write_linear_layers),
    "kimi_linear": Part(_read_kimi_linear, _write_kimi_linear),
    "mlp_layer_types": Part(_read_mlp_types, _write_mlp_types),
    "ernie_layers": Part(_read_ernie, _write_ernie),
    "dsa": Part(_read_dsa),
    "mimo": Part(_read_mimo, _write_mimo),
    "dense_first_layers": Part(
        *(partial(each, entry="num_dense_layers") for each in (read_dense_first, write_dense_first))
    ),
}
