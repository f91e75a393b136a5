"""Mixtral, Qwen2-MoE and Qwen3-MoE: config.json read and written, and the names of their tensors.

The layout is that of Llama with experts instead of the MLP. All route by a softmax over all experts. Renormalizing the
top k (Mixtral always, the others with `norm_topk_prob`) equals a softmax over the top k, which is
`moe_router_pre_softmax` off. Coefficients of auxiliary losses do not describe the weights: written, never read.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanotrain.config.config import ModelConfig, MoEConfig
from nanotrain.config.derive import moe_layers
from nanotrain.config.pattern import write_pattern
from nanotrain.interop.hf.llama import LLAMA, check_full_attention, read_shared, write_shared
from nanotrain.interop.hf.mistral import read_window, write_window
from nanotrain.interop.hf.naming import HFName, Naming
from nanotrain.interop.hf.reject import reject, require_values
from nanotrain.spec.shape import ModelShape

# Defaults of transformers for entries that config.json omits.
MIXTRAL: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
QWEN2_MOE: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 151936,
}
QWEN3_MOE: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
}


def read_mixtral(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a Mixtral. Its router input jitter is ignored.

    Raises:
        HuggingFaceError: an unsupported feature.
    """
    shared = read_shared({**MIXTRAL, **raw}, default_positions=131072)
    width = shared.pop("ffn_hidden_size")
    return ModelConfig(
        window_size=read_window(raw),
        moe=MoEConfig(
            num_experts=raw.get("num_local_experts", raw.get("num_experts", 8)),
            ffn_hidden_size=width,
            router_topk=raw.get("num_experts_per_tok", 2),
        ),
        **shared,
    )


def read_qwen2_moe(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a Qwen2-MoE; see `read_mixtral`."""
    check_full_attention(raw)
    require_values(raw, {"qkv_bias": True})
    experts = _read_experts(raw, num_experts=60, ffn_hidden_size=1408, topk=4)
    shared = raw.get("shared_expert_intermediate_size", 5632)
    model_config = ModelConfig(
        add_qkv_bias=True,
        moe=replace(experts, shared_expert_intermediate_size=shared, shared_expert_gate=True),
        **read_shared({**QWEN2_MOE, **raw}, default_positions=32768),
    )
    return _with_expert_layers(model_config, raw)


def read_qwen3_moe(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a Qwen3-MoE; see `read_mixtral`."""
    check_full_attention(raw)
    require_values(raw, {"attention_bias": False})
    model_config = ModelConfig(
        qk_layernorm=True,
        moe=_read_experts(raw, num_experts=128, ffn_hidden_size=768, topk=8),
        **read_shared({**QWEN3_MOE, **raw}, default_positions=32768),
    )
    return _with_expert_layers(model_config, raw)


def _read_experts(raw: Mapping[str, Any], *, num_experts: int, ffn_hidden_size: int, topk: int) -> MoEConfig:
    """The experts and the router of a Qwen; the arguments are the defaults of its family."""
    return MoEConfig(
        num_experts=raw.get("num_experts", raw.get("num_local_experts", num_experts)),
        ffn_hidden_size=raw.get("moe_intermediate_size", ffn_hidden_size),
        router_topk=raw.get("num_experts_per_tok", topk),
        router_pre_softmax=not raw.get("norm_topk_prob", False),
    )


def _with_expert_layers(model_config: ModelConfig, raw: Mapping[str, Any]) -> ModelConfig:
    """The model with the layers that have experts in a Qwen."""
    dense, step = set(raw.get("mlp_only_layers") or ()), raw.get("decoder_sparse_step", 1)
    layers = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(model_config.num_layers))
    moe = model_config.moe or MoEConfig()
    if not moe.num_experts or not any(layers):
        reject("num_experts", moe.num_experts, instead="above 0, with experts in some layer,")
    ffn = None if all(layers) else model_config.ffn_hidden_size  # the width of an MLP that no layer has
    return replace(model_config, moe=replace(moe, layer_freq=write_pattern(layers)), ffn_hidden_size=ffn)


def write_mixtral(model_config: ModelConfig) -> dict[str, Any]:
    """Write the config.json of a Mixtral; what it cannot represent is detected by reading it back."""
    shape = ModelShape.of(model_config)
    experts = {
        "intermediate_size": shape.ffn_size if shape.moe is None else shape.moe.ffn_size,
        "num_local_experts": 0 if shape.moe is None else shape.moe.num_experts,
        "router_jitter_noise": 0.0,
    }
    return write_shared(model_config) | _write_router(model_config) | experts | write_window(model_config)


def write_qwen2_moe(model_config: ModelConfig) -> dict[str, Any]:
    """Write the config.json of a Qwen2-MoE; see `write_mixtral`."""
    width = (model_config.moe or MoEConfig()).shared_expert_intermediate_size
    shared = {"qkv_bias": True, "shared_expert_intermediate_size": width or 0}
    return write_shared(model_config) | _write_experts(model_config) | shared


def write_qwen3_moe(model_config: ModelConfig) -> dict[str, Any]:
    """Write the config.json of a Qwen3-MoE; see `write_mixtral`."""
    return write_shared(model_config) | _write_experts(model_config) | {"attention_bias": False}


def _write_experts(model_config: ModelConfig) -> dict[str, Any]:
    """The experts and the router of a Qwen."""
    shape = ModelShape.of(model_config)
    return _write_router(model_config) | {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(shape.num_layers) if not shape.has_experts(layer)],
        "moe_intermediate_size": shape.ffn_size if shape.moe is None else shape.moe.ffn_size,
        "norm_topk_prob": not (model_config.moe or MoEConfig()).router_pre_softmax,
        "num_experts": 0 if shape.moe is None else shape.moe.num_experts,
        "use_sliding_window": False,
    }


def _write_router(model_config: ModelConfig) -> dict[str, Any]:
    # transformers multiplies by the top k and takes the mean over layers, where the layers are summed here
    moe, num_layers = model_config.moe or MoEConfig(), sum(moe_layers(model_config))
    return {
        "num_experts_per_tok": moe.router_topk,
        "output_router_logits": False,
        "router_aux_loss_coef": sum(moe.aux_loss_coeff) * num_layers / moe.router_topk,
    }


def _naming(router: str, **experts: str | HFName) -> Naming:
    """The names of Llama, and those of the modules of an MoE layer."""
    names = {f"mlp.experts.{module}": name for module, name in experts.items()}
    return replace(LLAMA, layers={**LLAMA.layers, "mlp.router": router, **names})


MIXTRAL_NAMES = _naming(
    "block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{expert}.w1",
    up="block_sparse_moe.experts.{expert}.w3",
    down="block_sparse_moe.experts.{expert}.w2",
)
SHARED_EXPERT = {f"mlp.shared.{name}": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}
SHARED_EXPERT["mlp.shared_gate"] = "mlp.shared_expert_gate"
QWEN3_MOE_NAMES = _naming(
    "mlp.gate",
    gate="mlp.experts.{expert}.gate_proj",
    up="mlp.experts.{expert}.up_proj",
    down="mlp.experts.{expert}.down_proj",
)
GATE_UP = ("mlp.experts.gate", "mlp.experts.up")
# Both in memory in transformers 5, where experts are stacked; files of a state dict have these.
FUSED_NAMES = _naming(
    "mlp.gate",
    gate=HFName("mlp.experts.gate_up_proj", fused=GATE_UP, is_full=True),
    up=HFName("mlp.experts.gate_up_proj", fused=GATE_UP, is_full=True),
    down=HFName("mlp.experts.down_proj", is_full=True),
)
QWEN2_MOE_NAMES, QWEN2_MOE_FUSED = (
    replace(naming, layers={**naming.layers, **SHARED_EXPERT}) for naming in (QWEN3_MOE_NAMES, FUSED_NAMES)
)
