"""When two model sections mean the same model."""

from dataclasses import fields, replace

from nanotrain.config.config import ModelConfig, PositionEmbedding, RouterScore
from nanotrain.config.derive import ffn_size, head_dim, moe_ffn_size, moe_layers, query_groups
from nanotrain.config.pattern import write_pattern

# Free to choose beside given weights: they say how a model is trained or laid out, not what it computes.
FREE_FIELDS = ("make_vocab_size_divisible_by", "init_method_std")
FREE_EXPERT_FIELDS = (
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_expert_capacity_factor",
)


def free_fields(model_config: ModelConfig) -> tuple[str, ...]:
    """Fields that say nothing about a model's weights."""
    return FREE_FIELDS if model_config.num_experts is None else FREE_FIELDS + FREE_EXPERT_FIELDS


def canonical(model_config: ModelConfig) -> ModelConfig:
    """The same model with every derived size written out and every idle field at its default."""
    layers = moe_layers(model_config)
    model_config = replace(
        model_config,
        num_query_groups=query_groups(model_config),
        kv_channels=head_dim(model_config),
        add_qkv_bias=model_config.add_qkv_bias and not model_config.add_bias_linear,
        moe_ffn_hidden_size=moe_ffn_size(model_config) if any(layers) else None,
        ffn_hidden_size=None if all(layers) else ffn_size(model_config),
        moe_layer_freq=write_pattern(layers) if any(layers) else "1",
    )
    if model_config.position_embedding_type is not PositionEmbedding.rope:
        model_config = replace(_without(model_config, "rotary_base"), use_rope_scaling=False)
    if not model_config.use_rope_scaling:
        model_config = _without(model_config, "rope_")
    if not any(layers):
        model_config = _without(model_config, "moe_", "num_experts")
    if not model_config.moe_router_enable_expert_bias:
        model_config = _without(model_config, "moe_router_bias_update_rate")
    if model_config.moe_router_score_function is RouterScore.sigmoid:
        model_config = _without(model_config, "moe_router_pre_softmax")
    if not model_config.multi_latent_attention:
        model_config = _without(
            model_config, "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"
        )
    return model_config


def _without(model_config: ModelConfig, *prefixes: str) -> ModelConfig:
    """The model with the fields whose names begin so at their defaults."""
    default = ModelConfig()
    names = [field.name for field in fields(ModelConfig) if field.name.startswith(prefixes)]
    return replace(model_config, **{name: getattr(default, name) for name in names})
