"""Mistral and Phi-3: config.json read and written, and the names of their tensors.

Both have the layout of Llama. Phi-3's files concatenate query, key and value, and gate and up; it may rotate a share of
the channels of a head.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanotrain.config.config import ModelConfig
from nanotrain.interop.hf.llama import LLAMA, read_shared, write_shared
from nanotrain.interop.hf.naming import HFName
from nanotrain.interop.hf.reject import reject

# Defaults of transformers for entries that config.json omits.
MISTRAL: dict[str, Any] = {"intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096}
PHI3: dict[str, Any] = {"vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "rms_norm_eps": 1e-5}


def read_mistral(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a Mistral.

    Raises:
        HuggingFaceError: an unsupported feature.
    """
    raw = {**MISTRAL, **raw}
    return ModelConfig(window_size=read_window(raw), **read_shared(raw, default_positions=131072))


def read_phi3(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a Phi-3; see `read_mistral`."""
    raw = {**PHI3, **raw}
    kind = (raw.get("rope_parameters") or raw.get("rope_scaling") or {}).get("rope_type", "default")
    if kind != "default":  # transformers takes every other kind for longrope
        reject("rope_type", kind, instead="default")
    shared = read_shared(raw, default_positions=4096, has_partial_rope=True)
    return ModelConfig(window_size=read_window(raw), **shared)


def read_window(raw: Mapping[str, Any]) -> int | None:
    """Keys before its own that a query attends to; transformers counts its own too. None where all positions fit."""
    window, positions = raw.get("sliding_window"), raw.get("max_position_embeddings")
    return None if window is None or (positions is not None and window >= positions) else window - 1


def write_window(model_config: ModelConfig) -> dict[str, Any]:
    """The entry of config.json about the window."""
    return {"sliding_window": None if model_config.window_size is None else model_config.window_size + 1}


def write_mistral(model_config: ModelConfig) -> dict[str, Any]:
    """Write the config.json of a Mistral; what it cannot represent is detected by reading it back."""
    return write_shared(model_config) | write_window(model_config)


def write_phi3(model_config: ModelConfig) -> dict[str, Any]:
    """Write the config.json of a Phi-3; see `write_mistral`."""
    special = {"pad_token_id": None}  # the default is outside of a small vocabulary
    return write_shared(model_config) | special | write_window(model_config)


QKV = ("attention.query", "attention.key", "attention.value")
GATE_UP = ("mlp.gate", "mlp.up")
PHI3_NAMES = replace(
    LLAMA,
    layers={
        **LLAMA.layers,
        **dict.fromkeys(QKV, HFName("self_attn.qkv_proj", fused=QKV)),
        **dict.fromkeys(GATE_UP, HFName("mlp.gate_up_proj", fused=GATE_UP)),
    },
)
