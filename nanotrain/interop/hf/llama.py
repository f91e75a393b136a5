"""Llama, Qwen2, Qwen3 and SmolLM3: config.json read and written, and the names of their tensors.

They share one layout and differ in biases, norms and layers without rotary positions; rope.py has these positions.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanotrain.config.config import Activation, ModelConfig
from nanotrain.config.derive import no_rope_layers
from nanotrain.config.pattern import write_pattern
from nanotrain.interop.hf.naming import Naming
from nanotrain.interop.hf.reject import reject, require_values
from nanotrain.interop.hf.rope import read_rope, write_rope
from nanotrain.spec.shape import ModelShape


def read_llama(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a Llama.

    Raises:
        HuggingFaceError: an unsupported feature.
    """
    attention_bias, mlp_bias = raw.get("attention_bias", False), raw.get("mlp_bias", False)
    if attention_bias != mlp_bias:
        reject("attention_bias", attention_bias, instead=f"that of mlp_bias, {str(mlp_bias).lower()}")
    return ModelConfig(add_bias_linear=bool(attention_bias), **read_shared(raw, default_positions=2048))


# what transformers takes where config.json of a Qwen2 or Qwen3 leaves it out
QWEN: dict[str, Any] = {"intermediate_size": 22016, "vocab_size": 151936}


def read_qwen2(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a Qwen2; see `read_llama`."""
    check_full_attention(raw)
    return ModelConfig(add_qkv_bias=True, **read_shared({**QWEN, **raw}, default_positions=32768))


def read_qwen3(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a Qwen3; see `read_llama`."""
    check_full_attention(raw)
    require_values(raw, {"attention_bias": False})
    shared = read_shared({**QWEN, "head_dim": 128, **raw}, default_positions=32768)
    return ModelConfig(qk_layernorm=True, **shared)


# what transformers takes where config.json of a SmolLM3 leaves it out
SMOLLM3: dict[str, Any] = {
    "num_hidden_layers": 36,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 128256,
    "max_position_embeddings": 32768,
    "rope_theta": 2000000.0,
}


def write_llama(model_config: ModelConfig) -> dict[str, Any]:
    """Write the config.json of a Llama; what it cannot represent is detected by reading it back."""
    bias = model_config.add_bias_linear
    return write_shared(model_config) | {"attention_bias": bias, "mlp_bias": bias, "pretraining_tp": 1}


def write_qwen2(model_config: ModelConfig) -> dict[str, Any]:
    """Write the config.json of a Qwen2; see `write_llama`."""
    return write_shared(model_config) | {"use_sliding_window": False}


def write_qwen3(model_config: ModelConfig) -> dict[str, Any]:
    """Write the config.json of a Qwen3; see `write_llama`."""
    return write_shared(model_config) | {"attention_bias": False, "use_sliding_window": False}


def read_smollm3(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a SmolLM3, whose entry no_rope_layers has a 0 for a layer without; see `read_llama`."""
    raw = {**SMOLLM3, **raw}
    if raw.get("use_sliding_window") and raw.get("sliding_window") is not None:
        reject("use_sliding_window", True, instead="false")
    described = read_llama({**raw, "tie_word_embeddings": raw.get("tie_word_embeddings", True)})
    layers, interval = raw.get("no_rope_layers"), int(raw.get("no_rope_layer_interval", 4))
    if layers is None:
        layers = [int((layer + 1) % interval != 0) for layer in range(described.num_layers)]
    without = tuple(not has_rope for has_rope in layers[: described.num_layers])
    return replace(described, no_rope_freq=write_pattern(without) if any(without) else "0")


def write_smollm3(model_config: ModelConfig) -> dict[str, Any]:
    """Write the config.json of a SmolLM3; see `write_llama`."""
    layers = [int(not without) for without in no_rope_layers(model_config)]
    own = {"no_rope_layers": layers, "layer_types": ["full_attention"] * len(layers), "use_sliding_window": False}
    return write_llama(model_config) | own | {"pad_token_id": None}  # the default is outside of a small vocabulary


def read_shared(raw: Mapping[str, Any], *, default_positions: int, has_partial_rope: bool = False) -> dict[str, Any]:
    """Fields of ModelConfig that all families of this layout share."""
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        reject("hidden_act", raw["hidden_act"], instead="silu")
    heads, hidden = raw.get("num_attention_heads", 32), raw.get("hidden_size", 4096)
    return {
        "num_layers": raw.get("num_hidden_layers", 32),
        "hidden_size": hidden,
        "ffn_hidden_size": raw.get("intermediate_size", 11008),
        "num_attention_heads": heads,
        "num_query_groups": raw.get("num_key_value_heads") or heads,
        "kv_channels": raw.get("head_dim") or hidden // heads,
        "max_position_embeddings": raw.get("max_position_embeddings", default_positions),
        "vocab_size": raw.get("vocab_size", 32000),
        "norm_epsilon": raw.get("rms_norm_eps", 1e-6),
        "activation": Activation.swiglu,
        "untie_embeddings_and_output_weights": not raw.get("tie_word_embeddings", False),
        "init_method_std": raw.get("initializer_range", 0.02),
        **read_rope(raw, has_partial=has_partial_rope),
    }


def check_full_attention(raw: Mapping[str, Any]) -> None:
    """Refuse a Qwen with sliding-window attention."""
    layers = raw.get("num_hidden_layers", 32)
    kinds = set(raw.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        reject("layer_types", sorted(kinds)[0], instead="full_attention")
    # Without layer_types the window applies from layer max_window_layers on.
    if raw.get("use_sliding_window") and not raw.get("layer_types") and raw.get("max_window_layers", 28) < layers:
        reject("use_sliding_window", True, instead="false")


def write_shared(model_config: ModelConfig) -> dict[str, Any]:
    """Entries of config.json that all families of this layout share."""
    shape = ModelShape.of(model_config)
    return {
        "attention_dropout": 0.0,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": model_config.hidden_size,
        "initializer_range": model_config.init_method_std,
        "intermediate_size": shape.ffn_size,
        "max_position_embeddings": model_config.max_position_embeddings,
        "num_attention_heads": model_config.num_attention_heads,
        "num_hidden_layers": model_config.num_layers,
        "num_key_value_heads": shape.num_query_groups,
        "rms_norm_eps": model_config.norm_epsilon,
        "tie_word_embeddings": not model_config.untie_embeddings_and_output_weights,
        "vocab_size": model_config.vocab_size,
        **write_rope(model_config),
    }


LLAMA = Naming(
    ends={"embedding.word": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"},
    layer="model.layers.{layer}",
    layers={
        "attention_norm": "input_layernorm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.query_norm": "self_attn.q_norm",
        "attention.key_norm": "self_attn.k_norm",
        "attention.output": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
)
