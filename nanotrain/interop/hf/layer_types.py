"""Entries of config.json about kinds of layers, as parts (parts.py) of hybrid families.

nemotron_h_layers   one letter per layer, which is Mamba-2, attention, an MLP or experts alone
granite_layers      Mamba-2 in place of attention in some layers; experts in all layers or none
bamba_layers        the same without experts, by numbers of the layers with attention
mamba2_layers       Mamba-2 alone in all layers
falcon_h1_layers    attention and Mamba-2 side by side in all layers, and factors
lfm2_layers         short convolutions in place of attention in some layers
linear_layers       the gated delta rule in place of attention in some layers
kimi_linear         KDA in place of MLA in some layers, in entries of two kinds
bailing_layers      Ling 3: the same with bounded decays
dsa                 an indexer in every layer
shared_dsa          GLM-5.2: an indexer in some layers, whose selection the next ones read
minimax_m3          an indexer of blocks in some layers
"""

import math
from collections.abc import Sequence
from typing import Any

from nanotrain.config.layer_kinds import DSAConfig, LinearAttentionConfig
from nanotrain.config.model import ModelConfig, MoEConfig
from nanotrain.config.notation import read_hybrid_pattern, write_pattern
from nanotrain.interop.hf.canonical import resolved, write_layers
from nanotrain.interop.hf.config_class import pass_over
from nanotrain.interop.hf.experts import read_mlp_types, write_num_shared
from nanotrain.interop.hf.layout import Part, Raw, Values, reject
from nanotrain.quantities import count_of, round_up
from nanotrain.spec.shape import ModelShape

# names of transformers 5 and those that every version reads
FULL, LINEAR = "full_attention", "linear_attention"
BLOCKS = "minimax_m3_sparse"
KINDS = {"linear_attention": "mamba", "full_attention": "attention"}
LETTERS = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}


def _read_kinds(raw: Raw, default: str, *, known: Sequence[str]) -> list[str]:
    """The kind of every layer; `default` where config.json names none."""
    stored = raw.get("layer_types") or raw.get("layers_block_type")
    if not stored:
        stored = [default] * raw["num_hidden_layers"]
    kinds = [KINDS.get(kind, kind) for kind in stored]
    for kind in kinds:
        if kind not in known:
            reject("layer_types", kind, instead=f"one of {', '.join(known)}")
    return kinds


def check_length(kinds: Sequence[str], num_layers: int) -> None:
    """Check that a list of kinds has one for every layer."""
    if len(kinds) != num_layers:
        reject("layer_types", f"of {count_of(len(kinds), 'layer')}", instead=f"of {num_layers}")


def mixer_values(mixer: str, kinds: list[str], *, num_layers: int) -> Values:
    """The values for a kind of linear attention in all layers that have no attention."""
    check_length(kinds, num_layers)
    layers = tuple(kind != "attention" for kind in kinds)
    if not any(layers):
        return {"linear_attention_type": None}
    values: Values = {"linear_attention_type": mixer}
    if not all(layers):
        values["linear_attention_freq"] = write_pattern(layers)
    return values


def layers_of_kind(kind: str, kinds: Sequence[str], *, num_layers: int) -> tuple[bool, ...]:
    """For every layer, whether its kind is `kind`; all other layers must have full attention."""
    unknown = sorted(set(kinds) - {kind, FULL})
    if unknown:
        reject("layer_types", unknown[0], instead=f"{kind} or {FULL}")
    check_length(kinds, num_layers)
    return tuple(other == kind for other in kinds)


def _read_nemotron(raw: Raw) -> Values:
    """Nemotron-H: a letter per layer, or in newer files a name per layer."""
    pattern = raw["hybrid_override_pattern"]
    if raw.get("layers_block_type", raw.get("layer_types")) is not None:
        pattern = "".join(LETTERS[kind] for kind in _read_kinds(raw, "", known=tuple(LETTERS)))
    if not pattern:
        reject("layers_block_type", [], instead="a kind per layer")
    letters = LETTERS.values()
    unknown = sorted(set(pattern) - set(letters))
    if unknown:
        reject("hybrid_override_pattern", unknown[0], instead=f"one of {', '.join(letters)}")
    experts = raw["n_routed_experts"]
    if "E" not in pattern:
        experts = None
    return {"hybrid_layer_pattern": pattern, "num_layers": len(pattern), "moe.num_experts": experts}


def _write_nemotron(model_config: ModelConfig) -> Values:
    moe = model_config.moe or MoEConfig(num_experts=0)
    pattern = read_hybrid_pattern(model_config.hybrid_layer_pattern or "")
    return {"hybrid_override_pattern": pattern, "n_routed_experts": moe.num_experts}


def _read_granite(raw: Raw) -> Values:
    """Granite 4: Mamba-2 or attention per layer, MLP or experts with a shared expert."""
    kinds = _read_kinds(raw, "mamba", known=("mamba", "attention"))
    shared = raw["shared_intermediate_size"]
    values = mixer_values("mamba2", kinds, num_layers=raw["num_hidden_layers"])
    if raw["position_embedding_type"] != "rope":
        values["position_embedding_type"] = "none"
    if raw["num_local_experts"]:
        values["moe.num_experts"] = raw["num_local_experts"]
        values["moe.ffn_hidden_size"] = raw["intermediate_size"]
        values["ffn_hidden_size"] = None
        values["moe.shared_expert_intermediate_size"] = shared
    else:
        values["ffn_hidden_size"] = shared
    if "mamba" in kinds:
        values |= _read_mamba(raw, raw["mamba_expand"] * raw["hidden_size"])
    else:
        pass_over(raw, "mamba_d_head", "mamba_expand", "mamba_n_heads", "time_step_limit")
    return values


def _write_granite(model_config: ModelConfig) -> Values:
    """The entries of Granite 4 for mixers, MLP widths and experts."""
    shape = ModelShape.of(model_config)
    moe = resolved(model_config).moe
    shared = shape.ffn_size if moe is None else moe.shared_expert_intermediate_size
    return {
        "intermediate_size": shape.moe_ffn_size,
        "layer_types": ["mamba" if mixer == "mamba2" else "attention" for mixer in shape.mixers],
        "num_local_experts": 0 if moe is None else moe.num_experts,
        "position_embedding_type": "rope" if model_config.has_rope else "nope",
        "shared_intermediate_size": shared or 0,
        **_write_mamba(shape),
    }


def _read_bamba(raw: Raw) -> Values:
    """Bamba: attention in the layers of `attn_layer_indices`, Mamba-2 in the others."""
    num_layers = raw["num_hidden_layers"]
    attention = raw.get("attn_layer_indices") or ()
    kinds = ["attention" if layer in attention else "mamba" for layer in range(num_layers)]
    values = mixer_values("mamba2", kinds, num_layers=num_layers)
    if "mamba" in kinds:
        return values | _read_mamba(raw, raw["mamba_expand"] * raw["hidden_size"])
    pass_over(raw, "mamba_d_head", "mamba_expand", "mamba_n_heads", "time_step_limit")
    return values


def _write_bamba(model_config: ModelConfig) -> Values:
    shape = ModelShape.of(model_config)
    layers = enumerate(shape.mixers)
    attention = [layer for layer, mixer in layers if mixer != "mamba2"]
    return {"attn_layer_indices": attention, **_write_mamba(shape)}


def _read_mamba2(raw: Raw) -> Values:
    """Mamba-2: all layers, and the lower bound of time steps."""
    inner = raw["expand"] * raw["hidden_size"]
    sizes = {"mamba_n_heads": raw["num_heads"], "mamba_d_head": raw["head_dim"]}
    values = _read_mamba(sizes | {"time_step_limit": raw.get("time_step_limit")}, inner)
    values["hybrid_layer_pattern"] = "M" * raw["num_hidden_layers"]
    return values


def _write_mamba2(model_config: ModelConfig) -> Values:
    shape = ModelShape.of(model_config)
    inner = shape.mamba_heads * shape.mamba.head_dim
    limit = _write_time_step_limit(shape.mamba.time_step_min)
    sizes = {"expand": inner // shape.hidden_size, "num_heads": shape.mamba_heads}
    return sizes | limit


def _write_mamba(shape: ModelShape) -> Values:
    """Sizes of Mamba-2, of which a model of attention alone needs some that fit."""
    num_heads, head_dim = 1, shape.hidden_size
    if "mamba2" in shape.mixers:
        num_heads, head_dim = shape.mamba_heads, shape.mamba.head_dim
    return {
        "mamba_d_head": head_dim,
        "mamba_expand": num_heads * head_dim // shape.hidden_size,
        "mamba_n_heads": num_heads,
        **_write_time_step_limit(shape.mamba.time_step_min),
    }


def _read_mamba(raw: Raw, inner: int) -> Values:
    """Sizes of Mamba-2 and the lower bound of its time steps; `inner` is heads x head_dim."""
    num_heads = raw["mamba_n_heads"]
    head_dim = raw["mamba_d_head"]
    if head_dim == "auto":
        head_dim = inner // num_heads
    if num_heads * head_dim != inner:
        expected = f"{inner // max(1, num_heads)}, {inner} / mamba_n_heads,"
        reject("mamba_d_head", head_dim, instead=expected)
    low, high = raw.get("time_step_limit") or (0.0, math.inf)
    if high not in (math.inf, {"__float__": "Infinity"}):
        reject("time_step_limit", [low, high], instead=f"[{low}, Infinity]")
    return {"mamba.num_heads": num_heads, "mamba.head_dim": head_dim, "mamba.time_step_min": low}


def _write_time_step_limit(low: float) -> Values:
    return {"time_step_limit": [low, math.inf]} if low else {}


def _read_falcon_h1(raw: Raw) -> Values:
    """Factors on inputs, for layers without biases, become factors on their outputs."""
    inner = raw["mamba_d_ssm"] or raw["mamba_expand"] * raw["hidden_size"]
    norm_is_first = raw["mamba_norm_before_gate"]
    if raw["mamba_rms_norm"] and norm_is_first:
        reject("mamba_norm_before_gate", True, instead="false")
    attention_input = raw["attention_in_multiplier"]
    mamba_input = raw["ssm_in_multiplier"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    mamba_factors = raw.get("ssm_multipliers") or [1.0] * 5
    gate, down = raw.get("mlp_multipliers") or (1.0, 1.0)
    scale = raw["key_multiplier"] * attention_input**2 * head_dim**-0.5
    values = _read_mamba(raw, inner)
    values["attention_output_multiplier"] = attention_input * raw["attention_out_multiplier"]
    values["logits_scaling"] = rounded(1 / raw["lm_head_multiplier"])
    values["mamba.multipliers"] = [mamba_input * factor for factor in mamba_factors]
    values["mlp_gate_multiplier"] = gate
    values["mlp_output_multiplier"] = down
    values["softmax_scale"] = rounded(scale)
    return values


def _write_falcon_h1(model_config: ModelConfig) -> Values:
    """The entries of Falcon-H1: sizes of Mamba-2, and its multipliers."""
    shape = ModelShape.of(model_config)
    scale = model_config.softmax_scale
    return {
        "attention_out_multiplier": model_config.attention_output_multiplier,
        "key_multiplier": 1.0 if scale is None else rounded(scale * shape.head_dim**0.5),
        "lm_head_multiplier": rounded(1 / model_config.logits_scaling),
        "mamba_d_head": shape.mamba.head_dim,
        "mamba_d_ssm": shape.mamba_heads * shape.mamba.head_dim,
        "mamba_n_heads": shape.mamba_heads,
        "mamba_norm_before_gate": False,
        "mlp_multipliers": [model_config.mlp_gate_multiplier, model_config.mlp_output_multiplier],
        "ssm_multipliers": model_config.mamba.multipliers,
        **_write_time_step_limit(model_config.mamba.time_step_min),
    }


def rounded(value: float) -> float:
    """Round to twelve digits, so that written values read back equal."""
    return float(f"{value:.12g}")


def _read_lfm2(raw: Raw) -> Values:
    """LFM2: short convolutions, and attention in the layers of `full_attn_idxs`."""
    num_layers = raw["num_hidden_layers"]
    attention = raw.get("full_attn_idxs")
    if attention is None:
        attention = range(num_layers)
    default = ["attention" if layer in attention else "conv" for layer in range(num_layers)]
    stored = raw.get("layer_types") or default
    kinds = _read_kinds({"layer_types": stored}, "", known=("conv", "attention"))
    inner = raw["intermediate_size"]
    if raw["block_auto_adjust_ff_dim"]:
        adjusted = int(raw["block_ffn_dim_multiplier"] * int(2 * inner / 3))
        inner = round_up(adjusted, raw["block_multiple_of"])
    values = mixer_values("short_conv", kinds, num_layers=num_layers)
    values["ffn_hidden_size"] = inner
    return values


def _write_lfm2(model_config: ModelConfig) -> Values:
    kinds = ["conv" if mixer == "short_conv" else FULL for mixer in model_config.mixers]
    attention = [layer for layer, kind in enumerate(kinds) if kind != "conv"]
    return {"block_auto_adjust_ff_dim": False, "full_attn_idxs": attention, "layer_types": kinds}


def _read_linear_layers(raw: Raw) -> Values:
    """Qwen3-Next: a kind per layer, or every n-th layer with full attention."""
    num_layers = raw["num_hidden_layers"]
    interval = raw.get("full_attention_interval") or 4
    kinds = raw.get("layer_types")
    if not kinds:
        kinds = [FULL if layer % interval == 0 else LINEAR for layer in range(1, num_layers + 1)]
    layers = layers_of_kind(LINEAR, kinds, num_layers=num_layers)
    if not any(layers):
        reject("layer_types", FULL, instead=f"{LINEAR} in some layer")
    return {"linear_attention_freq": "0" if all(layers) else write_pattern(layers)}


def _write_linear_layers(model_config: ModelConfig) -> Values:
    kind = model_config.linear_attention_type
    return {"layer_types": [LINEAR if mixer == kind else FULL for mixer in model_config.mixers]}


def _read_kimi_linear(raw: Raw) -> Values:
    """The kinds of the layers, by Moonshot's entries (numbers from 1) or by transformers'."""
    linear = raw.get("linear_attn_config") or {}
    num_layers = raw["num_hidden_layers"]
    for entry in ("gate_lower_bound", "use_full_rank_gate"):
        if linear.get(entry):
            reject(f"{entry} in linear_attn_config", linear[entry], instead="none")
    full = linear.get("full_attn_layers", range(5, num_layers + 1, 4))
    kinds = raw.get("layer_types")
    if not kinds:
        kinds = [FULL if layer in full else LINEAR for layer in range(1, num_layers + 1)]
    num_heads = linear.get("num_heads", raw["linear_num_heads"])
    head_dim = linear.get("head_dim", raw["linear_head_dim"])
    kernel = linear.get("short_conv_kernel_size", raw["linear_conv_kernel_dim"])
    values = _read_linear_layers(raw | {"layer_types": kinds})
    values |= read_mlp_types(raw)
    values["linear_attention.conv_kernel_dim"] = kernel
    values["linear_attention.num_key_heads"] = num_heads
    values["linear_attention.num_value_heads"] = num_heads
    values["linear_attention.key_head_dim"] = head_dim
    values["linear_attention.value_head_dim"] = head_dim
    return values


def _write_kimi_linear(model_config: ModelConfig) -> Values:
    """The entries of Kimi Linear: layer numbers from 1, in two lists."""
    linear = model_config.linear_attention or LinearAttentionConfig()
    moe = model_config.moe or MoEConfig()
    numbered = list(enumerate(model_config.mixers, start=1))
    entries = _write_linear_layers(model_config)
    entries["linear_attn_config"] = {
        "full_attn_layers": [layer for layer, mixer in numbered if mixer != "kda"],
        "head_dim": linear.key_head_dim,
        "kda_layers": [layer for layer, mixer in numbered if mixer == "kda"],
        "num_heads": linear.num_key_heads,
        "short_conv_kernel_size": linear.conv_kernel_dim,
    }
    entries["num_expert_group"] = moe.router_num_groups or 1
    entries["num_shared_experts"] = write_num_shared(model_config)
    return entries


def _read_dsa(raw: Raw) -> Values:
    """Check that every layer has an indexer, and experts as `first_k_dense_replace` says."""
    num_layers = raw["num_hidden_layers"]
    num_dense = raw["first_k_dense_replace"] or 0
    supported: dict[str, Any] = {
        "index_topk_freq": 1,
        "index_topk_pattern": "F" * num_layers,
        "layer_types": ["indexed_attention"] * num_layers,
        "indexer_types": ["full"] * num_layers,
        "mlp_layer_types": ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense),
    }
    for entry, value in supported.items():
        if raw.get(entry, value) not in (None, value):
            reject(entry, raw[entry], instead=str(value))
    return {}


def _read_bailing(raw: Raw) -> Values:
    """Ling 3: layers of KDA with as many heads as MLA; files may have later layers."""
    pass_over(raw, "num_nextn_predict_layers", "first_k_dense_replace", "layer_group_size")
    pass_over(raw, "head_dim", "short_conv_kernel_size", "rope_theta")  # as the class has them
    values = _read_linear_layers(raw) | read_mlp_types(raw)
    head_dim = raw["linear_head_dim"]
    num_heads = raw["linear_num_heads"]
    bound = raw["kda_lower_bound"]
    values["linear_attention.conv_kernel_dim"] = raw["linear_conv_kernel_dim"]
    values["linear_attention.num_key_heads"] = num_heads
    values["linear_attention.num_value_heads"] = num_heads
    values["linear_attention.key_head_dim"] = head_dim
    values["linear_attention.value_head_dim"] = head_dim
    if raw["kda_safe_gate"]:
        values["linear_attention.decay_bound"] = -bound
    return values


def _write_bailing(model_config: ModelConfig) -> Values:
    linear = model_config.linear_attention or LinearAttentionConfig()
    entries = _write_linear_layers(model_config)
    entries["head_dim"] = linear.key_head_dim
    entries["linear_head_dim"] = linear.key_head_dim
    entries["linear_num_heads"] = linear.num_key_heads
    entries["linear_conv_kernel_dim"] = linear.conv_kernel_dim
    entries["short_conv_kernel_size"] = linear.conv_kernel_dim
    entries["kda_safe_gate"] = linear.decay_bound is not None
    entries["kda_lower_bound"] = -(linear.decay_bound or 5.0)
    entries["num_nextn_predict_layers"] = 0
    entries["num_shared_experts"] = write_num_shared(model_config)
    return entries


INDEXERS = {"full": False, "shared": True}


def _read_shared_dsa(raw: Raw) -> Values:
    """GLM-5.2: a kind of indexer per layer, which the class derives from older entries."""
    kinds = raw["indexer_types"]
    check_length(kinds, raw["num_hidden_layers"])
    for kind in kinds:
        if kind not in INDEXERS:
            reject("indexer_types", kind, instead=f"one of {', '.join(INDEXERS)}")
    if kinds[0] != "full":
        reject("indexer_types of layer 0", kinds[0], instead="full")
    values = _read_dsa(
        raw | {"indexer_types": None, "index_topk_freq": 1, "index_topk_pattern": None}
    )
    values["dsa.share_freq"] = write_layers([INDEXERS[kind] for kind in kinds])
    return values


def _write_shared_dsa(model_config: ModelConfig) -> Values:
    shares = model_config.shared_selections
    return {"indexer_types": ["shared" if is_shared else "full" for is_shared in shares]}


def _read_minimax_m3(raw: Raw) -> Values:
    """The layers that select blocks of keys, and their number of blocks."""
    num_layers = raw["num_hidden_layers"]
    kinds = raw.get("layer_types") or [FULL] * num_layers
    layers = layers_of_kind(BLOCKS, kinds, num_layers=num_layers)
    if not any(layers):
        return {"sparse_attention_type": None}
    return {
        "dsa.k_norm_epsilon": raw["rms_norm_eps"],
        "dsa.layer_freq": write_pattern(layers),
        "dsa.topk": raw["index_topk_blocks"] * raw["index_block_size"],
    }


def _write_minimax_m3(model_config: ModelConfig) -> Values:
    """The kinds of the layers, and the number of blocks."""
    dsa = model_config.dsa or DSAConfig()
    mixers = ModelShape.of(model_config).mixers
    return {
        "index_topk_blocks": dsa.topk_blocks,
        "layer_types": [BLOCKS if mixer == "block_sparse" else FULL for mixer in mixers],
    }


LAYER_PARTS: dict[str, Part] = {
    "bailing_layers": Part(_read_bailing, _write_bailing),
    "minimax_m3": Part(_read_minimax_m3, _write_minimax_m3),
    "nemotron_h_layers": Part(_read_nemotron, _write_nemotron),
    "granite_layers": Part(_read_granite, _write_granite),
    "bamba_layers": Part(_read_bamba, _write_bamba),
    "mamba2_layers": Part(_read_mamba2, _write_mamba2),
    "falcon_h1_layers": Part(_read_falcon_h1, _write_falcon_h1),
    "lfm2_layers": Part(_read_lfm2, _write_lfm2),
    "linear_layers": Part(_read_linear_layers, _write_linear_layers),
    "kimi_linear": Part(_read_kimi_linear, _write_kimi_linear),
    "dsa": Part(_read_dsa),
    "shared_dsa": Part(_read_shared_dsa, _write_shared_dsa),
}
