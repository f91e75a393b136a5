"""OLMo 2 and OLMo 3: config.json read and written, and the names of their tensors.

Both normalize the outputs of attention and MLP instead of their inputs, and queries and keys over all heads together.
OLMo 3 has windows in three of four layers, in which rotary positions are not scaled.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanotrain.config.config import ModelConfig, NormPlacement
from nanotrain.interop.hf.llama import LLAMA, read_shared, write_shared
from nanotrain.interop.hf.reject import require_values
from nanotrain.interop.hf.rope import read_layered_rope, write_layered_rope
from nanotrain.interop.hf.windows import read_layer_windows, write_layer_windows

# Defaults of transformers for entries that config.json omits.
OLMO: dict[str, Any] = {"vocab_size": 50304, "rms_norm_eps": 1e-5}
NORMS: dict[str, Any] = {
    "norm_placement": NormPlacement.post,
    "qk_layernorm": True,
    "qk_layernorm_across_heads": True,
}


def read_olmo2(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of an OLMo 2.

    Raises:
        HuggingFaceError: an unsupported feature.
    """
    return ModelConfig(**_read(raw))


def read_olmo3(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of an OLMo 3; see `read_olmo2`."""
    rope = read_layered_rope(raw, base=500000.0, local_base=None)
    shared = _read({**raw, "rope_parameters": None, "rope_scaling": None})
    windows = read_layer_windows(raw, num_layers=shared["num_layers"], skip=4, window=4096)
    return ModelConfig(**shared | rope | windows)


def write_olmo2(model_config: ModelConfig) -> dict[str, Any]:
    """Write the config.json of an OLMo 2; what it cannot represent is detected by reading it back."""
    special = {"pad_token_id": None}  # the default may be outside of a small vocabulary
    return write_shared(model_config) | {"attention_bias": False} | special


def write_olmo3(model_config: ModelConfig) -> dict[str, Any]:
    """Write the config.json of an OLMo 3; see `write_olmo2`."""
    return write_olmo2(model_config) | write_layered_rope(model_config) | write_layer_windows(model_config)


def _read(raw: Mapping[str, Any]) -> dict[str, Any]:
    require_values(raw, {"attention_bias": False})
    return read_shared({**OLMO, **raw}, default_positions=2048) | NORMS


_KEPT = {name: hf for name, hf in LLAMA.layers.items() if name not in ("attention_norm", "mlp_norm")}
_POST_NORMS = {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
OLMO_NAMES = replace(LLAMA, layers=_KEPT | _POST_NORMS)
