"""Layers with a window in config.json (`sliding_window`, `layer_types`): `read_layer_windows`, `write_layer_windows`.

transformers counts the query itself as part of the window.
"""

from collections.abc import Mapping
from typing import Any

from nanotrain.config.config import ModelConfig
from nanotrain.config.derive import window_layers
from nanotrain.config.pattern import write_pattern
from nanotrain.interop.hf.reject import reject
from nanotrain.quantities import count_of

WINDOW, FULL = "sliding_attention", "full_attention"


def read_layer_windows(raw: Mapping[str, Any], *, num_layers: int, skip: int, window: int) -> dict[str, Any]:
    """The fields of ModelConfig about windows.

    Args:
        raw: the parsed config.json.
        num_layers: of the model.
        skip: without layer_types every layer of this number has no window.
        window: where config.json has none.

    Raises:
        HuggingFaceError: another kind of layer.
    """
    kinds = raw.get("layer_types") or [WINDOW if (layer + 1) % skip else FULL for layer in range(num_layers)]
    for kind in kinds:
        if kind not in (WINDOW, FULL):
            reject("layer_types", kind, instead=f"{WINDOW} or {FULL}")
    layers, size = tuple(kind == WINDOW for kind in kinds), raw.get("sliding_window", window)
    if size is None or not any(layers):
        return {}
    if len(layers) != num_layers:
        reject("layer_types", f"of {count_of(len(layers), 'layer')}", instead=f"of {num_layers}")
    return {"window_size": size - 1, "window_attn_skip_freq": "0" if all(layers) else write_pattern(layers)}


def write_layer_windows(model_config: ModelConfig) -> dict[str, Any]:
    """The entries of config.json about windows."""
    window = model_config.window_size
    layers = window_layers(model_config)
    return {
        "layer_types": [WINDOW if has else FULL for has in layers],
        "sliding_window": 4096 if window is None else window + 1,  # no layer reads it without a window
    }
