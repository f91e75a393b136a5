"""Mistral and Phi-3: config.json read and written, and the names of their tensors.

Both have the layout of Llama. Phi-3's files concatenate query, key and value, and gate and up; it may rotate a share of
the channels of a head.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanotrain.config.config import ModelConfig
from nanotrain.hf.llama import LLAMA, read_shared, write_shared
from nanotrain.hf.naming import HFName
from nanotrain.hf.reject import reject

# Defaults of transformers for entries that config.json omits.
MISTRAL: dict[str, Any] = {"intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096}
PHI3: dict[str, Any] = {"vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "rms_norm_eps": 1e-5}


def read_mistral(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a Mistral.

    Raises:
        HuggingFaceError: an unsupported feature.
    """
    raw = {**MISTRAL, **raw}
    check_window(raw)
    return ModelConfig(**read_shared(raw, default_positions=131072))


def read_phi3(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a Phi-3; see `read_mistral`."""
    raw = {**PHI3, **raw}
    check_window(raw)
    kind = (raw.get("rope_parameters") or raw.get("rope_scaling") or {}).get("rope_type", "default")
    if kind != "default":  # transformers takes every other kind for longrope
        reject("rope_type", kind, instead="default")
    return ModelConfig(**read_shared(raw, default_positions=4096, has_partial_rope=True))


def check_window(raw: Mapping[str, Any]) -> None:
    """Refuse a sliding window that is shorter than the sequences of the model; another one hides nothing."""
    window, positions = raw.get("sliding_window"), raw.get("max_position_embeddings")
    if window is not None and (positions is None or window < positions):
        reject("sliding_window", window, instead="null")


def write_mistral(model_config: ModelConfig) -> dict[str, Any]:
    """Write the config.json of a Mistral; what it cannot represent is detected by reading it back."""
    return write_shared(model_config) | {"sliding_window": None}


def write_phi3(model_config: ModelConfig) -> dict[str, Any]:
    """Write the config.json of a Phi-3; see `write_mistral`."""
    special = {"pad_token_id": None}  # the default is outside of a small vocabulary
    return write_shared(model_config) | special | {"sliding_window": None}


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
