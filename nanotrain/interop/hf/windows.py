"""Entries of config.json about layers with a window or without positions, as parts (parts.py).

window            one window for all layers
layer_windows     a window in some layers
rope_in_windows   EXAONE: rotary positions only in layers with a window
no_rope_layers    SmolLM3: no rotary positions in some layers
llama4            attention within chunks in layers with rotary positions, experts in some
gpt_neo_layers    GPT-Neo: global or local attention per layer
lara_layers       the gated delta rule, windows with rotary positions, attention without
"""

from collections.abc import Sequence
from typing import Any

from nanotrain.config.model import ModelConfig
from nanotrain.config.notation import read_layer_pattern, write_pattern
from nanotrain.interop.hf.canonical import write_layers
from nanotrain.interop.hf.config_class import pass_over
from nanotrain.interop.hf.experts import expert_layers, layers_with_experts
from nanotrain.interop.hf.layer_types import FULL, LINEAR, check_length, layers_of_kind
from nanotrain.interop.hf.layout import Part, Raw, Values, reject

SLIDING, CHUNKED = "sliding_attention", "chunked_attention"


def _read_window(raw: Raw) -> Values:
    """transformers counts the query itself; a window for all positions is none."""
    window = raw.get("sliding_window")
    if window is None or window >= raw["max_position_embeddings"]:
        return {"window_size": None}
    return {"window_size": window - 1}


def _write_window(model_config: ModelConfig) -> Values:
    window = model_config.window_size
    return {"sliding_window": None if window is None else window + 1}


def read_window_layers(raw: Raw) -> tuple[bool, ...]:
    """Whether a layer has a window, for every layer."""
    num_layers = raw["num_hidden_layers"]
    step: Any = raw.get("sliding_window_pattern")
    first = raw.get("first_full_attention", -1)
    kinds = raw.get("layer_types")
    if not kinds:
        full = {*range(first % step, num_layers, step), *raw.get("full_layers", ())}
        kinds = _write_kinds([layer not in full for layer in range(num_layers)], SLIDING)
    return layers_of_kind(SLIDING, kinds, num_layers=num_layers)


def _write_kinds(layers: Sequence[bool], kind: str) -> list[str]:
    """The kind of every layer: `kind` where the value is true, else full attention."""
    return [kind if is_kind else FULL for is_kind in layers]


def _read_layer_windows(raw: Raw) -> Values:
    """The size of windows, and the layers that have one."""
    layers = read_window_layers(raw)
    size = raw["sliding_window"]
    if size is None or not any(layers):
        return {}
    return {
        "window_size": size - 1,
        "window_attn_skip_freq": "0" if all(layers) else write_pattern(layers),
    }


def _write_layer_windows(model_config: ModelConfig) -> Values:
    window = model_config.window_size
    return {
        "layer_types": _write_kinds(model_config.window_layers, SLIDING),
        # transformers counts the token itself; without a window no layer reads the number
        "sliding_window": 4096 if window is None else window + 1,
    }


def read_rope_in_windows(raw: Raw) -> Values:
    """EXAONE: in a model with a window, only layers that have it have rotary positions."""
    if raw["sliding_window"] is None:
        return {"no_rope_freq": "0"}
    without = [not has_window for has_window in read_window_layers(raw)]
    return {"no_rope_freq": write_layers(without)}


def _write_rope_in_windows(model_config: ModelConfig) -> Values:
    if any(model_config.no_rope_layers) or any(model_config.window_layers):
        return {}
    return {"sliding_window": None}


def _read_no_rope(raw: Raw) -> Values:
    """SmolLM3's no_rope_layers has a 0 for a layer without rotary positions."""
    if raw.get("use_sliding_window") and raw.get("sliding_window") is not None:
        reject("use_sliding_window", True, instead="false")
    num_layers = raw["num_hidden_layers"]
    interval = int(raw.get("no_rope_layer_interval", 4))
    has_rope = raw.get("no_rope_layers")
    if not has_rope:
        has_rope = [layer % interval != 0 for layer in range(1, num_layers + 1)]
    return {"no_rope_freq": write_layers([not value for value in has_rope[:num_layers]])}


def _write_no_rope(model_config: ModelConfig) -> Values:
    layers = [int(not without) for without in model_config.no_rope_layers]
    return {
        "no_rope_layers": layers,
        "layer_types": [FULL] * len(layers),
        "use_sliding_window": False,
    }


def _read_llama4(raw: Raw) -> Values:
    """Layers with rotary positions attend within chunks, unless config.json lists the layers."""
    num_layers = raw["num_hidden_layers"]
    step = raw["interleave_moe_layer_step"]
    values = _read_no_rope(raw)
    values["moe.shared_expert_intermediate_size"] = raw["intermediate_size"]
    kinds = raw.get("layer_types")
    if not kinds:
        pattern = values["no_rope_freq"]
        without = read_layer_pattern("no_rope_freq", pattern, num_layers=num_layers)
        kinds = _write_kinds([not value for value in without], CHUNKED)
    chunked = layers_of_kind(CHUNKED, kinds, num_layers=num_layers)
    sparse = raw.get("moe_layers")
    if sparse is None:
        sparse = range(step - 1, num_layers, step)
    values |= expert_layers(tuple(layer in sparse for layer in range(num_layers)))
    if any(chunked):
        values["attention_chunk_size"] = raw["attention_chunk_size"]
        values["window_attn_skip_freq"] = write_pattern(chunked)
    if not raw["attn_temperature_tuning"]:
        values["attn_scale"] = 0.0
    return values


def _write_llama4(model_config: ModelConfig) -> Values:
    """Chunks of attention, layers without rotary positions, and layers with experts."""
    entries = _write_no_rope(model_config)
    # transformers divides by it in any case
    entries["attention_chunk_size"] = model_config.attention_chunk_size or 8192
    entries["attn_temperature_tuning"] = model_config.attn_scale > 0
    entries["layer_types"] = _write_kinds(model_config.window_layers, CHUNKED)
    entries["moe_layers"] = layers_with_experts(model_config)
    return entries


def _read_lara(raw: Raw) -> Values:
    """Lara: one of three kinds per layer; layers with a window alone have rotary positions."""
    kinds = raw["layer_types"]
    unknown = sorted(set(kinds) - {LINEAR, SLIDING, FULL})
    if unknown:
        reject("layer_types", unknown[0], instead=f"{LINEAR}, {SLIDING} or {FULL}")
    check_length(kinds, raw["num_hidden_layers"])
    for kind in (LINEAR, SLIDING):
        if kind not in kinds:
            reject("layer_types", FULL, instead=f"{kind} in some layer")
    return {
        "linear_attention_freq": write_pattern(tuple(kind == LINEAR for kind in kinds)),
        "no_rope_freq": write_pattern(tuple(kind != SLIDING for kind in kinds)),
        "window_attn_skip_freq": write_pattern(tuple(kind == SLIDING for kind in kinds)),
        "window_size": raw["sliding_window"] - 1,
    }


def _write_lara(model_config: ModelConfig) -> Values:
    """The kind of every layer, and the size of windows."""
    kinds = []
    layers = zip(model_config.mixers, model_config.window_layers, strict=True)
    for mixer, has_window in layers:
        softmax = SLIDING if has_window else FULL
        kinds.append(LINEAR if mixer == "gated_delta_net" else softmax)
    window = model_config.window_size or 0
    return {"layer_types": kinds, "sliding_window": window + 1}


GPT_NEO_KINDS = {"global": FULL, "local": SLIDING}


def _read_gpt_neo(raw: Raw) -> Values:
    """GPT-Neo: kinds of layers under names of its own; the class makes the list of the types."""
    pass_over(raw, "attention_types")
    kinds = [GPT_NEO_KINDS.get(kind, kind) for kind in raw["attention_layers"]]
    entries = {"layer_types": kinds, "sliding_window": raw["window_size"]}
    return _read_layer_windows(entries | {"num_hidden_layers": raw["num_layers"]})


def _write_gpt_neo(model_config: ModelConfig) -> Values:
    written = _write_layer_windows(model_config)
    kinds = ["local" if kind == SLIDING else "global" for kind in written["layer_types"]]
    return {
        "attention_layers": kinds,
        "attention_types": [[[kind], 1] for kind in kinds],
        "window_size": written["sliding_window"],
    }


WINDOW_PARTS: dict[str, Part] = {
    "window": Part(_read_window, _write_window),
    "layer_windows": Part(_read_layer_windows, _write_layer_windows),
    "rope_in_windows": Part(read_rope_in_windows, _write_rope_in_windows),
    "no_rope_layers": Part(_read_no_rope, _write_no_rope),
    "llama4": Part(_read_llama4, _write_llama4),
    "gpt_neo_layers": Part(_read_gpt_neo, _write_gpt_neo),
    "lara_layers": Part(_read_lara, _write_lara),
}
