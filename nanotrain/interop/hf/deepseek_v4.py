"""Entries of config.json of DeepSeek-V4, as parts (parts.py).

deepseek_v4   kinds of attention and of experts per layer, and rotary positions of two kinds
"""

from typing import Any

from nanotrain.config.layer_kinds import CompressedAttentionConfig
from nanotrain.config.model import ModelConfig
from nanotrain.interop.hf.canonical import resolved, write_layers
from nanotrain.interop.hf.config_class import pass_over
from nanotrain.interop.hf.experts import expert_layers
from nanotrain.interop.hf.layer_types import check_length
from nanotrain.interop.hf.layout import Part, Raw, Values, reject
from nanotrain.interop.hf.positions import read_rope, write_rope
from nanotrain.interop.hf.windows import SLIDING

SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
LETTERS = {SLIDING: "W", SPARSE: "C", HEAVY: "H"}
KINDS = {"sliding": SLIDING, "csa": SPARSE, "hca": HEAVY}
HASHED, ROUTED = "hash_moe", "moe"


def _read_deepseek_v4(raw: Raw) -> Values:
    """Kinds of layers, sizes of windows, and rotary positions."""
    num_layers = raw["num_hidden_layers"]
    kinds = raw["layer_types"]
    experts = raw["mlp_layer_types"]
    check_length(kinds, num_layers)
    for kind in kinds:
        if kind not in LETTERS:
            reject("layer_types", kind, instead=f"one of {', '.join(LETTERS)}")
    if len(experts) != num_layers or not {*experts} <= {HASHED, ROUTED}:
        reject("mlp_layer_types", experts, instead=f"{HASHED} or {ROUTED} per layer")
    rates = raw["compress_rates"]
    values = _read_positions(raw)
    values |= expert_layers((True,) * num_layers)
    values["compressed.layer_pattern"] = "".join(LETTERS[kind] for kind in kinds)
    values["compressed.sparse_ratio"] = rates[SPARSE]
    values["compressed.heavy_ratio"] = rates[HEAVY]
    values["moe.hash_layers"] = write_layers([kind == HASHED for kind in experts])
    values["moe.shared_expert_intermediate_size"] = raw["moe_intermediate_size"]
    values["window_size"] = raw["sliding_window"] - 1
    return values


def _read_positions(raw: Raw) -> Values:
    """Rotary positions of layers with compressed keys, and the rotary base of layers without.

    transformers nests both tables; with YaRN the length of queries and keys has no factor.
    """
    pass_over(raw, "rope_theta", "compress_rope_theta", "partial_rotary_factor", "qk_rope_head_dim")
    tables = raw["rope_parameters"]
    main = tables["main"]
    rotary = dict(tables["compress"])
    if main.get("rope_type", "default") != "default":
        reject("rope_type of main", main["rope_type"], instead="default")
    fraction = rotary.get("partial_rotary_factor", 1.0)
    if main.get("partial_rotary_factor", 1.0) != fraction:
        entry = "partial_rotary_factor of main"
        reject(entry, main.get("partial_rotary_factor"), instead=str(fraction))
    factor = rotary.pop("attention_factor", None)
    if rotary.get("rope_type") == "yarn":
        if factor not in (None, 1.0):
            reject("attention_factor of compress", factor, instead="1.0")
        rotary |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    values = read_rope(raw | {"rope_parameters": rotary, "rope_scaling": None}, has_partial=True)
    values["rotary_base_local"] = float(main["rope_theta"])
    return values


def _write_deepseek_v4(model_config: ModelConfig) -> Values:
    """Kinds of layers and experts, sizes of windows, and rotary positions."""
    compressed = model_config.compressed or CompressedAttentionConfig()
    window = model_config.window_size or 0
    kinds = [KINDS.get(str(mixer), SLIDING) for mixer in model_config.mixers]
    experts = [HASHED if is_hashed else ROUTED for is_hashed in model_config.hash_layers]
    moe = resolved(model_config).moe
    return _write_positions(model_config) | {
        "compress_rates": {SPARSE: compressed.sparse_ratio, HEAVY: compressed.heavy_ratio},
        # another name of moe_intermediate_size
        "intermediate_size": None if moe is None else moe.ffn_hidden_size,
        "layer_types": kinds,
        "mlp_layer_types": experts,
        "sliding_window": window + 1,
    }


def _write_positions(model_config: ModelConfig) -> Values:
    """Both tables of rotary positions, and the entries that they come from."""
    base = model_config.rotary_base
    local_base = model_config.rotary_base_local
    if local_base is None:
        local_base = base
    fraction = model_config.rotary_percent
    scaling: dict[str, Any] = dict(write_rope(model_config)["rope_scaling"] or {})
    for entry in ("mscale", "mscale_all_dim", "type"):
        scaling.pop(entry, None)
    if scaling.get("rope_type") == "yarn":
        scaling["attention_factor"] = 1.0
    shared = {"rope_type": "default", "partial_rotary_factor": fraction}
    return {
        "compress_rope_theta": base,
        "partial_rotary_factor": fraction,
        "rope_theta": local_base,
        "rope_parameters": {
            "main": shared | {"rope_theta": local_base},
            "compress": shared | scaling | {"rope_theta": base},
        },
    }


DEEPSEEK_V4_PARTS: dict[str, Part] = {"deepseek_v4": Part(_read_deepseek_v4, _write_deepseek_v4)}
