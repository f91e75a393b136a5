"""Gemma 3 (text): config.json read and written, and the names of its tensors.

Norms before and after attention and MLP store their difference from 1; word embeddings are scaled; most layers have a
window, and rotary positions of another base.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanotrain.config.config import Activation, ModelConfig, NormPlacement
from nanotrain.interop.hf.llama import LLAMA, read_shared, write_shared
from nanotrain.interop.hf.reject import require_values
from nanotrain.interop.hf.rope import read_layered_rope, write_layered_rope
from nanotrain.interop.hf.windows import read_layer_windows, write_layer_windows
from nanotrain.spec.shape import ModelShape

# Defaults of transformers for entries that config.json omits.
GEMMA3: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
}
REQUIRED = {
    "attention_bias": False,
    "use_bidirectional_attention": False,
    "hidden_activation": GEMMA3["hidden_activation"],
}


def read_gemma3(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a Gemma 3 text model.

    Raises:
        HuggingFaceError: an unsupported feature.
    """
    raw = {**GEMMA3, **raw}
    require_values(raw, REQUIRED)
    rope = read_layered_rope(raw, base=1e6, local_base=1e4)
    plain = {**raw, "hidden_act": "silu", "rope_parameters": None, "rope_scaling": None}
    shared = read_shared(plain, default_positions=131072)
    windows = read_layer_windows(
        raw, num_layers=shared["num_layers"], skip=raw.get("sliding_window_pattern") or 6, window=4096
    )
    scalar = raw["query_pre_attn_scalar"]
    special = {
        "activation": Activation.geglu_tanh,
        "apply_layernorm_1p": True,
        "norm_placement": NormPlacement.sandwich,
        "qk_layernorm": True,
        "scale_embeddings": True,
        "softmax_scale": None if scalar == shared["kv_channels"] else scalar**-0.5,
        "attn_logit_softcapping": raw.get("attn_logit_softcapping"),
        "final_logit_softcapping": raw.get("final_logit_softcapping"),
    }
    return ModelConfig(**shared | rope | windows | special)


def write_gemma3(model_config: ModelConfig) -> dict[str, Any]:
    """Write the config.json of a Gemma 3; what it cannot represent is detected by reading it back."""
    scale = model_config.softmax_scale
    special = {
        "attention_bias": False,
        "attn_logit_softcapping": model_config.attn_logit_softcapping,
        "final_logit_softcapping": model_config.final_logit_softcapping,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": ModelShape.of(model_config).head_dim if scale is None else round(scale**-2),
    }
    entries = write_shared(model_config) | write_layered_rope(model_config) | write_layer_windows(model_config)
    del entries["hidden_act"]
    return entries | special


GEMMA3_NAMES = replace(
    LLAMA,
    layers={
        **LLAMA.layers,
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
)
