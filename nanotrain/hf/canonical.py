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


def free_fields(model: ModelConfig) -> tuple[str, ...]:
    """Fields that say nothing about a model's weights."""
    return FREE_FIELDS if model.num_experts is None else FREE_FIELDS + FREE_EXPERT_FIELDS


def canonical(model: ModelConfig) -> ModelConfig:
    """The same model with every derived size written out and every idle field at its default."""
    layers = moe_layers(model)
    model = replace(
        model,
        num_query_groups=query_groups(model),
        kv_channels=head_dim(model),
        add_qkv_bias=model.add_qkv_bias and not model.add_bias_linear,
        moe_ffn_hidden_size=moe_ffn_size(model) if any(layers) else None,
        ffn_hidden_size=None if all(layers) else ffn_size(model),
        moe_layer_freq=write_pattern(layers) if any(layers) else "1",
    )
    if model.position_embedding_type is not PositionEmbedding.rope:
        model = replace(_without(model, "rotary_base"), use_rope_scaling=False)
    if not model.use_rope_scaling:
        model = _without(model, "rope_")
    if not any(layers):
        model = _without(model, "moe_", "num_experts")
    if not model.moe_router_enable_expert_bias:
        model = _without(model, "moe_router_bias_update_rate")
    if model.moe_router_score_function is RouterScore.sigmoid:
        model = _without(model, "moe_router_pre_softmax")
    if not model.multi_latent_attention:
        model = _without(model, "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    return model


def _without(model: ModelConfig, *prefixes: str) -> ModelConfig:
    """The model with the fields whose names begin so at their defaults."""
    default = ModelConfig()
    names = [field.name for field in fields(ModelConfig) if field.name.startswith(prefixes)]
    return replace(model, **{name: getattr(default, name) for name in names})
