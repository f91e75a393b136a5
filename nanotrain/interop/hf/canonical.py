"""Model sections that describe the same model: `canonical` makes them equal, `resolved` sets derived sizes."""

import math
from dataclasses import replace
from typing import Any

from nanotrain.config.model import ModelConfig, MoEConfig
from nanotrain.config.notation import write_pattern
from nanotrain.config.schema import without_absent
from nanotrain.interop.hf.tables import read_tables
from nanotrain.spec.shape import ModelShape


def free_keys(model_config: ModelConfig) -> tuple[str, ...]:
    """Keys of the model section that do not depend on the weights."""
    tables = read_tables()
    return (*tables["free_keys"], *(() if model_config.moe is None else tables["free_expert_keys"]))


def resolved(model_config: ModelConfig) -> ModelConfig:
    """The same model with derived sizes set."""
    shape = ModelShape.of(model_config)
    moe = model_config.moe
    if moe is not None:
        moe = replace(moe, ffn_hidden_size=shape.moe_ffn_size)
    return replace(
        model_config,
        num_query_groups=shape.query_groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_size,
        moe=moe,
    )


def canonical(model_config: ModelConfig) -> ModelConfig:
    """The same model with derived sizes resolved and fields without effect at their defaults."""
    model_config = without_absent(model_config)
    shape = ModelShape.of(model_config)
    moe = shape.moe if any(shape.moe_layers) else None
    model_config = replace(
        resolved(model_config),
        add_qkv_bias=model_config.add_qkv_bias and not model_config.add_bias_linear,
        ffn_hidden_size=None if all(shape.moe_layers) else shape.ffn_size,
        mtp=replace(model_config.mtp, num_layers=shape.num_mtp_layers or None),
        moe=None if moe is None else _canonical_experts(moe, shape),
    )
    is_mla, position = model_config.multi_latent_attention, model_config.position_embedding_type
    scale, without = model_config.softmax_scale, model_config.no_rope_layers
    if scale is not None and math.isclose(scale, shape.head_dim**-0.5) and not is_mla:
        model_config = replace(model_config, softmax_scale=None)
    model_config = replace(model_config, no_rope_freq=write_pattern(without) if any(without) else "0")
    has_rope, is_rope = model_config.has_rope, position == "rope"
    without_effect = {
        ("rotary_base", "rotary_base_local", "no_rope_freq"): not has_rope,
        ("rotary_percent",): not has_rope or is_mla,
        ("use_rope_scaling", *_ROPE_SCALING): not is_rope or not model_config.use_rope_scaling,
        ("rotary_seq_len_interpolation_factor",): not is_rope,
        ("glu_linear_offset", "activation_func_clamp_value"): not model_config.is_gated,
        ("qk_layernorm_across_heads",): not model_config.qk_layernorm,
        ("window_attn_skip_freq", "rotary_base_local"): model_config.window_size is None,
    }
    reset: dict[str, Any] = {
        name: getattr(_DEFAULT, name) for names, is_unused in without_effect.items() if is_unused for name in names
    }
    model_config = replace(model_config, **reset)
    if model_config.window_size is None:
        return model_config
    if model_config.rotary_base_local == model_config.rotary_base and not _is_rope_scaled(model_config):
        model_config = replace(model_config, rotary_base_local=None)
    layers = model_config.window_layers
    return replace(model_config, window_attn_skip_freq="0" if all(layers) else write_pattern(layers))


def _canonical_experts(moe: MoEConfig, shape: ModelShape) -> MoEConfig:
    moe = replace(moe, ffn_hidden_size=shape.moe_ffn_size, layer_freq=write_pattern(shape.moe_layers))
    if moe.shared_expert_intermediate_size is None:
        moe = replace(moe, shared_expert_gate=MoEConfig().shared_expert_gate)
    if not moe.router_enable_expert_bias:
        moe = replace(moe, router_bias_update_rate=MoEConfig().router_bias_update_rate)
    if moe.router_score_function == "sigmoid":
        moe = replace(moe, router_pre_softmax=MoEConfig().router_pre_softmax)
    return moe


def _is_rope_scaled(model_config: ModelConfig) -> bool:
    """Whether rotary frequencies are changed for a longer context."""
    is_longer = model_config.use_rope_scaling or model_config.rotary_seq_len_interpolation_factor != 1
    return model_config.yarn is not None or is_longer


_DEFAULT = ModelConfig()
_ROPE_SCALING = tuple(name for name in vars(_DEFAULT) if name.startswith("rope_"))
