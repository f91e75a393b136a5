"""Entries of config.json of Laguna, as parts (parts.py).

laguna_heads   query heads by kind of layer, and one gate per head or per channel
laguna_rope    rotary positions by kind of layer, each with a share of the channels
"""

from nanotrain.config.model import ModelConfig
from nanotrain.interop.hf.config_class import pass_over
from nanotrain.interop.hf.layer_types import FULL, check_length
from nanotrain.interop.hf.layout import Part, Raw, Values, reject
from nanotrain.interop.hf.positions import read_layered_rope, write_layered_rope
from nanotrain.interop.hf.windows import SLIDING, read_window_layers

PER_HEAD, PER_CHANNEL = (True, "per-head"), "per-element"


def _read_heads(raw: Raw) -> Values:
    heads = raw["num_attention_heads_per_layer"]
    windows = read_window_layers(raw)
    check_length(heads, len(windows))
    found: dict[bool, int] = {}
    for number, has_window in zip(heads, windows, strict=True):
        if found.setdefault(has_window, number) != number:
            instead = "one number for all layers of a kind"
            reject("num_attention_heads_per_layer", heads, instead=instead)
    gating = raw["gating"]
    if gating not in (*PER_HEAD, PER_CHANNEL):
        reject("gating", gating, instead=f"true, {PER_HEAD[1]} or {PER_CHANNEL}")
    return {
        "attention_output_gate_per_head": gating in PER_HEAD,
        "num_attention_heads": found.get(False, heads[0]),
        "window_num_attention_heads": found.get(True),
    }


def _write_heads(model_config: ModelConfig) -> Values:
    num_heads = model_config.num_attention_heads
    window_heads = model_config.window_num_attention_heads or num_heads
    windows = model_config.window_layers
    is_per_head = model_config.attention_output_gate_per_head
    return {
        "gating": PER_HEAD[1] if is_per_head else PER_CHANNEL,
        "num_attention_heads_per_layer": [window_heads if own else num_heads for own in windows],
    }


def _read_rope(raw: Raw) -> Values:
    """A table for each kind of layer of the model; channels without a share are all rotated."""
    pass_over(raw, "partial_rotary_factor")  # beside the tables nothing reads it
    tables = {}
    for kind in sorted(set(raw["layer_types"])):
        table = raw["rope_parameters"].get(kind)
        if not table or "rope_theta" not in table:
            reject(f"{kind} in rope_parameters", table, instead="a table with rope_theta")
        tables[kind] = {"partial_rotary_factor": 1.0} | table
    tables.setdefault(FULL, tables.get(SLIDING))
    return read_layered_rope(raw | {"rope_parameters": tables}, has_partial=True)


def _write_rope(model_config: ModelConfig) -> Values:
    return {"rope_parameters": write_layered_rope(model_config)["rope_parameters"]}


LAGUNA_PARTS: dict[str, Part] = {
    "laguna_heads": Part(_read_heads, _write_heads),
    "laguna_rope": Part(_read_rope, _write_rope),
}
