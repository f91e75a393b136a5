"""Entries of config.json of LFM3, as a part (parts.py).

lfm3_layers   short convolutions, windows and full attention, with rotary positions of their own
"""

from collections.abc import Mapping
from typing import Any

from nanotrain.config.model import ModelConfig
from nanotrain.config.notation import write_pattern
from nanotrain.interop.hf.layer_types import FULL, mixer_values
from nanotrain.interop.hf.layout import Part, Raw, Values, reject
from nanotrain.interop.hf.windows import SLIDING

CONV = "conv"


def _read_layers(raw: Raw) -> Values:
    kinds = raw["layer_types"]
    unknown = sorted(set(kinds) - {CONV, SLIDING, FULL})
    if unknown:
        reject("layer_types", unknown[0], instead=f"{CONV}, {SLIDING} or {FULL}")
    mixers = [CONV if kind == CONV else "attention" for kind in kinds]
    values = mixer_values("short_conv", mixers, num_layers=raw["num_hidden_layers"])
    values["attention_output_gate_per_head"] = raw["use_attention_gate"]
    values["norm_placement"] = "sandwich" if raw["use_sandwich_norm"] else "pre"
    windows = tuple(kind == SLIDING for kind in kinds)
    if any(windows):
        values["window_size"] = raw["sliding_window"] - 1
        values["window_attn_skip_freq"] = "0" if all(windows) else write_pattern(windows)
    tables = {}
    for kind in sorted(set(kinds) - {CONV}):
        table = raw["rope_parameters"].get(kind)
        if not table or "rope_theta" not in table:
            reject(f"{kind} in rope_parameters", table, instead="a table with rope_theta")
        tables[kind] = table
    return values | _read_rope(tables)


def _read_rope(tables: Mapping[str, Raw]) -> Values:
    """Rotary positions of layers without a window, and of layers with one."""
    full = tables.get(FULL, {})
    local = tables.get(SLIDING, {})
    share = full.get("partial_rotary_factor", 1.0)
    for kind, table in tables.items():
        rope_type = table.get("rope_type", "default")
        is_proportional = kind == FULL and rope_type == "proportional"
        if rope_type != "default" and not is_proportional:
            reject(f"rope_type of {kind}", rope_type, instead="default")
        if table.get("partial_rotary_factor", 1.0) != 1.0 and not is_proportional:
            share = table["partial_rotary_factor"]
            reject(f"partial_rotary_factor of {kind}", share, instead="1.0")
        if table.get("factor", 1.0) != 1.0:
            reject(f"factor of {kind}", table["factor"], instead="1.0")
    values: Values = {}
    bases = [float(table["rope_theta"]) for table in (full, local) if table]
    if bases:
        values["rotary_base"] = bases[0]
    if local:
        values["rotary_base_local"] = bases[-1]
    if full.get("rope_type") == "proportional":
        values["rotary_proportional"] = True
        values["rotary_percent"] = float(share)
    return values


def _write_layers(model_config: ModelConfig) -> Values:
    """The kinds of the layers, and the size of windows."""
    kinds = []
    layers = zip(model_config.mixers, model_config.window_layers, strict=True)
    for mixer, has_window in layers:
        softmax = SLIDING if has_window else FULL
        kinds.append(CONV if mixer == "short_conv" else softmax)
    window = model_config.window_size
    return {
        "layer_types": kinds,
        # transformers counts the token itself; without a window no layer reads the number
        "sliding_window": 256 if window is None else window + 1,
        "use_sandwich_norm": model_config.norm_placement == "sandwich",
        **_write_rope(model_config),
    }


def _write_rope(model_config: ModelConfig) -> Values:
    """A table of rotary positions for each kind of softmax attention."""
    base = model_config.rotary_base
    local_base = model_config.rotary_base_local or base
    full: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if model_config.rotary_proportional:
        full["rope_type"] = "proportional"
    if model_config.rotary_percent != 1.0:
        full["partial_rotary_factor"] = model_config.rotary_percent
    windowed = {"rope_type": "default", "rope_theta": local_base}
    return {"rope_parameters": {FULL: full, SLIDING: windowed}}


LFM3_PARTS: dict[str, Part] = {"lfm3_layers": Part(_read_layers, _write_layers)}
