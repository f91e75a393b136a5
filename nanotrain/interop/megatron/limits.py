"""Settings of a model that checkpoints of Megatron-LM cannot represent, as far as is known."""

from nanotrain.config.config import Config
from nanotrain.config.model import ModelConfig
from nanotrain.config.notation import read_hybrid_pattern
from nanotrain.config.rules.settings import Settings

MAMBA_EPSILON = 1e-5  # of the norm of gated outputs


def unsupported_settings(model_config: ModelConfig) -> list[str]:
    """The settings of a model that Megatron-LM cannot represent."""
    settings = Settings(Config(model=model_config))
    unsupported = layer_settings(settings) | other_settings(settings) | hybrid_settings(settings)
    return [name for name, is_set in unsupported.items() if is_set]


def layer_settings(c: Settings) -> dict[str, bool]:
    """Whether settings of layers and of their attention are set, by name."""
    model = c.model
    has_bias = model.add_bias_linear
    after_rope = model.qk_layernorm_after_rope
    across_heads = model.qk_layernorm_across_heads
    has_experts = c.has_experts
    return {
        "attention_output_gate_per_head": model.attention_output_gate_per_head,
        "linear_attention_type": model.linear_attention_type is not None,
        "norm_placement other than pre": model.norm_placement != "pre",
        "qk_layernorm_across_heads": model.qk_layernorm and across_heads,
        "sinks_in_windows_only": model.sinks_in_windows_only,
        "sparse_attention_type": model.sparse_attention_type is not None,
        "add_bias_linear with experts": has_bias and has_experts,
        "scale_embeddings": model.scale_embeddings,
        "embedding_l2_norm": model.embedding_l2_norm,
        "normalization L2Norm": model.normalization == "L2Norm",
        "layernorm_parameters": model.layernorm_parameters != "weight_and_bias",
        "residual_type other than plain": model.residual_type != "plain",
        "add_attention_output_bias": model.add_attention_output_bias,
        "add_mlp_bias": model.add_mlp_bias,
        "add_head_bias": model.add_head_bias,
        "activation xielu": model.activation == "xielu",
        "activation relu": model.activation == "relu",
        "value_channels": model.value_channels is not None,
        "window_kv_channels": model.window_kv_channels is not None,
        "attention_k_eq_v": model.attention_k_eq_v,
        "value_l2_norm": model.value_l2_norm,
        "rotary_proportional": model.rotary_proportional,
        "layer_input_size": model.layer_input_size > 0,
        "layer_scale": model.layer_scale,
        "use_double_wide_mlp": model.use_double_wide_mlp,
        "num_kv_shared_layers": model.num_kv_shared_layers > 0,
        "window_query_groups": model.window_query_groups is not None,
        "window_num_attention_heads": model.window_num_attention_heads is not None,
        "attention_output_gate_activation": model.attention_output_gate_activation != "sigmoid",
        "attention_output_multiplier": model.attention_output_multiplier != 1,
        "attn_logit_softcapping": model.attn_logit_softcapping is not None,
        "final_logit_softcapping": model.final_logit_softcapping is not None,
        "qk_layernorm_after_rope": model.qk_layernorm and after_rope,
    }


def other_settings(c: Settings) -> dict[str, bool]:
    """Whether settings of positions, experts and factors are set, by name."""
    model = c.model
    moe = c.moe
    has_bias = moe.router_enable_expert_bias
    is_partly_rotary = model.no_rope_freq != "0"
    return {
        "qk_l2_norm beside layers without rotary positions": model.qk_l2_norm and is_partly_rotary,
        "attention_chunk_size": model.attention_chunk_size is not None,
        "attn_scale": model.attn_scale > 0,
        "query_scaling_beta": c.yarn.query_scaling_beta > 0,
        "mla_scale_lora": c.mla.scale_lora,
        "compressed_norm_epsilon": c.mla.compressed_norm_epsilon is not None,
        "moe_router_enable_expert_bias with softmax": has_bias
        and moe.router_score_function == "softmax",
        "rotary_base_local": model.rotary_base_local is not None,
        "position_embedding_type longrope": model.longrope is not None,
        "window_rotary_percent": model.window_rotary_percent is not None,
        "learned_position_offset": model.learned_position_offset > 0,
        "moe_num_zero_experts": moe.num_zero_experts > 0,
        "moe_hash_layers": any(model.hash_layers),
        "moe_shared_expert_average": moe.shared_expert_average,
        "moe_output_norm": moe.output_norm,
        "moe_separate_norms": moe.separate_norms,
        "moe_shortcut": moe.shortcut,
        "use_mup": model.use_mup,
        "embedding_multiplier": model.embedding_multiplier != 1,
        "residual_multiplier": model.residual_multiplier != 1,
        "logits_scaling": model.logits_scaling != 1,
        "mlp_gate_multiplier": model.mlp_gate_multiplier != 1,
        "mlp_output_multiplier": model.mlp_output_multiplier != 1,
    }


def hybrid_settings(c: Settings) -> dict[str, bool]:
    """Whether settings of a pattern of layers are set, by name.

    Source: Megatron-LM, `mamba_hybrid_layer_allocation.py` and `mamba_mixer.py` (0.16.1): other
    sizes are constants there.
    """
    pattern = c.model.hybrid_layer_pattern
    if pattern is None:
        return {}
    letters = set(read_hybrid_pattern(pattern))
    mamba = c.model.mamba
    return {
        "hybrid_layer_pattern with other letters than M * - E": bool(letters - set("M*-E")),
        "hybrid_layer_pattern with multi-token prediction": bool(c.mtp.num_layers),
        "mamba_conv_kernel_dim other than 4": "M" in letters and mamba.conv_kernel_dim != 4,
        "mamba_rms_norm off": "M" in letters and not mamba.rms_norm,
        "mamba_time_step_min": mamba.time_step_min > 0,
        "mamba_multipliers": any(factor != 1 for factor in mamba.multipliers),
        "norm_epsilon other than 1e-5 with Mamba-2": "M" in letters
        and c.model.norm_epsilon != MAMBA_EPSILON,
    }
