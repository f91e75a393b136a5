"""gpt-oss: config.json read and written, and the names of its tensors.

Attention sinks, windows in every other layer, biases everywhere, and experts whose gated activation is bounded. Expert
weights are stored as [experts, inputs, outputs], where gate and up alternate, in bf16 or MXFP4 (mxfp4.py).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanotrain.config.config import Activation, ModelConfig, MoEConfig, SoftmaxType
from nanotrain.interop.hf.llama import LLAMA, read_shared, write_shared
from nanotrain.interop.hf.naming import HFName
from nanotrain.interop.hf.reject import require_values
from nanotrain.interop.hf.windows import read_layer_windows, write_layer_windows
from nanotrain.spec.shape import ModelShape

# Defaults of transformers for entries that config.json omits.
GPT_OSS: dict[str, Any] = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "swiglu_limit": 7.0,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
ALPHA = 1.702  # of the activation, x * sigmoid(alpha x)


def read_gpt_oss(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a gpt-oss.

    Raises:
        HuggingFaceError: an unsupported feature.
    """
    raw = {**GPT_OSS, **raw}
    require_values(raw, {"attention_bias": True, "swiglu_alpha": ALPHA})
    if not raw.get("rope_parameters") and not raw.get("rope_scaling"):
        raw["rope_parameters"] = YARN
    shared = read_shared(raw, default_positions=131072)
    width = shared.pop("ffn_hidden_size")
    windows = read_layer_windows(raw, num_layers=shared["num_layers"], skip=2, window=128)
    experts = MoEConfig(
        num_experts=raw.get("num_experts", raw["num_local_experts"]),
        ffn_hidden_size=width,
        router_topk=raw["num_experts_per_tok"],
    )
    special = {
        "activation": Activation.quick_geglu,
        "activation_func_clamp_value": float(raw["swiglu_limit"]),
        "add_bias_linear": True,
        "glu_linear_offset": 1.0,
        "softmax_type": SoftmaxType.learnable,
    }
    return ModelConfig(**shared | windows | special, moe=experts)


def write_gpt_oss(model_config: ModelConfig) -> dict[str, Any]:
    """Write the config.json of a gpt-oss; what it cannot represent is detected by reading it back."""
    shape, moe = ModelShape.of(model_config), model_config.moe or MoEConfig()
    special = {
        "attention_bias": True,
        "intermediate_size": shape.ffn_size if shape.moe is None else shape.moe.ffn_size,
        "num_experts_per_tok": moe.router_topk,
        "num_local_experts": moe.num_experts or 0,
        "swiglu_limit": model_config.activation_func_clamp_value or 0.0,
    }
    entries = write_shared(model_config) | write_layer_windows(model_config) | special
    if entries["rope_scaling"] is None:  # else transformers takes its own
        entries["rope_parameters"] = {"rope_type": "default", "rope_theta": model_config.rotary_base}
    return entries


GATE_UP = "mlp.experts.gate_up_proj"
GPT_OSS_NAMES = replace(
    LLAMA,
    layers={
        **LLAMA.layers,
        "attention.softmax_offset": HFName("self_attn.sinks", is_full=True),
        "mlp.router": "mlp.router",
        "mlp.experts.gate.weight": HFName(GATE_UP, interleaved=(0, 2), transposed=True, is_full=True),
        "mlp.experts.up.weight": HFName(GATE_UP, interleaved=(1, 2), transposed=True, is_full=True),
        "mlp.experts.gate.bias": HFName(f"{GATE_UP}_bias", interleaved=(0, 2), is_full=True),
        "mlp.experts.up.bias": HFName(f"{GATE_UP}_bias", interleaved=(1, 2), is_full=True),
        "mlp.experts.down.weight": HFName("mlp.experts.down_proj", transposed=True, is_full=True),
        "mlp.experts.down.bias": HFName("mlp.experts.down_proj_bias", is_full=True),
    },
)
