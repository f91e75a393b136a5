"""Rules of the model section: heads, positions, experts and latent attention that fit together."""

from nanotrain.config.config import Config, ModelConfig, PositionEmbedding, RouterScore
from nanotrain.config.derive import head_dim, moe_layers, query_groups
from nanotrain.errors import ConfigError


def check_model(config: Config) -> None:
    """Check every rule of the model section.

    Raises:
        ConfigError: the first rule that is broken.
    """
    model_config = config.model
    if model_config.multi_latent_attention:
        check_latent_attention(model_config)
    else:
        check_heads(model_config)
    check_positions(model_config, config.data.seq_length)
    if model_config.moe.num_experts is not None:
        check_experts(model_config, model_config.moe.num_experts)
        check_expert_groups(model_config, model_config.moe.num_experts)


def check_heads(model_config: ModelConfig) -> None:
    """Heads cut the width evenly, groups the heads, and rope the pairs of channels."""
    if model_config.kv_channels is None and model_config.hidden_size % model_config.num_attention_heads:
        raise ConfigError(
            f"hidden_size {model_config.hidden_size} cannot be cut into {model_config.num_attention_heads} heads",
            why="num_attention_heads must divide it where kv_channels is unset",
            fix="set --num-attention-heads to a divisor or --kv-channels to the width of a head",
        )
    if model_config.num_attention_heads % query_groups(model_config):
        raise ConfigError(
            f"{model_config.num_attention_heads} query heads cannot share {query_groups(model_config)} key/value heads",
            why="num_query_groups must divide num_attention_heads",
            fix="set --num-query-groups to a divisor",
        )
    if model_config.position_embedding_type is PositionEmbedding.rope and head_dim(model_config) % 2:
        raise ConfigError(
            f"a head is {head_dim(model_config)} wide",
            why="rope rotates pairs of channels, so the width must be even",
            fix="set --kv-channels to an even number or another --num-attention-heads",
        )


def check_latent_attention(model_config: ModelConfig) -> None:
    """Latent attention carries positions in a rotary part of its own, and has no biases."""
    if model_config.position_embedding_type is not PositionEmbedding.rope:
        raise ConfigError(
            f"position_embedding_type is {model_config.position_embedding_type.value} with multi_latent_attention",
            why=f"{model_config.mla.qk_pos_emb_head_dim} channels per head (qk_pos_emb_head_dim) are rotated",
            fix="set --position-embedding-type rope",
        )
    if model_config.mla.qk_pos_emb_head_dim % 2:
        raise ConfigError(
            f"qk_pos_emb_head_dim is {model_config.mla.qk_pos_emb_head_dim}",
            why="rope rotates pairs of channels, so the width must be even",
            fix=f"set --qk-pos-emb-head-dim {model_config.mla.qk_pos_emb_head_dim + 1}",
        )
    if model_config.add_bias_linear:
        raise ConfigError(
            "add_bias_linear with multi_latent_attention",
            why="its projections have no biases",
            fix="leave out --add-bias-linear or --multi-latent-attention",
        )


def check_positions(model_config: ModelConfig, seq_length: int) -> None:
    """A sample fits the positions."""
    positions = model_config.max_position_embeddings
    if seq_length > positions:
        raise ConfigError(
            f"seq_length {seq_length} is longer than max_position_embeddings {positions}",
            why="the model has no positions beyond",
            fix=f"set --seq-length {positions} or raise --max-position-embeddings",
        )


def check_experts(model_config: ModelConfig, num_experts: int) -> None:
    """Some layer has experts, a token finds as many as it is sent to, and the router can learn."""
    if not any(moe_layers(model_config)):
        raise ConfigError(
            f"no layer has the {num_experts} experts",
            why=f"moe_layer_freq is {model_config.moe.layer_freq}",
            fix="set --moe-layer-freq 1 or leave --num-experts out",
        )
    if model_config.moe.router_topk > num_experts:
        raise ConfigError(
            f"a token cannot be sent to {model_config.moe.router_topk} of {num_experts} experts",
            why="moe_router_topk must be at most num_experts",
            fix=f"set --moe-router-topk to at most {num_experts} or raise --num-experts",
        )
    is_softmax = model_config.moe.router_score_function is RouterScore.softmax
    if is_softmax and model_config.moe.router_topk == 1 and not model_config.moe.router_pre_softmax:
        raise ConfigError(
            "moe_router_topk is 1 and moe_router_pre_softmax is off",
            why="a softmax over the one chosen expert is always 1, so the router would never learn",
            fix="set --moe-router-pre-softmax or --moe-router-topk 2",
        )
    if is_softmax and model_config.moe.router_enable_expert_bias:
        raise ConfigError(
            "moe_router_enable_expert_bias with moe_router_score_function softmax",
            why="the bias is added to scores that do not depend on one another",
            fix="set --moe-router-score-function sigmoid or leave --moe-router-enable-expert-bias out",
        )
    if model_config.add_bias_linear:
        raise ConfigError(
            f"add_bias_linear with {num_experts} experts",
            why="experts have no biases",
            fix="leave out --add-bias-linear or --num-experts",
        )


def check_expert_groups(model_config: ModelConfig, num_experts: int) -> None:
    """Groups are of equal size, and those a token may choose from hold enough experts."""
    groups, chosen = model_config.moe.router_num_groups, model_config.moe.router_group_topk
    if groups is None and chosen is None:
        return
    if groups is None or chosen is None:
        said, missing = ("group_topk", "num_groups") if groups is None else ("num_groups", "group_topk")
        raise ConfigError(
            f"moe_router_{said} is {groups or chosen} and moe_router_{missing} is unset",
            why="a choice within groups needs both: how many groups there are, and how many a token may choose from",
            fix=f"set --moe-router-{missing.replace('_', '-')} too, or leave both out",
        )
    if num_experts % groups:
        raise ConfigError(
            f"{num_experts} experts cannot form {groups} groups",
            why="moe_router_num_groups must divide num_experts",
            fix="set --moe-router-num-groups to a divisor",
        )
    if chosen > groups:
        raise ConfigError(
            f"a token cannot choose from {chosen} of {groups} groups",
            why="moe_router_group_topk must be at most moe_router_num_groups",
            fix=f"set --moe-router-group-topk to at most {groups}",
        )
    size = num_experts // groups
    if model_config.moe.router_topk > chosen * size:
        raise ConfigError(
            f"a token cannot be sent to {model_config.moe.router_topk} experts",
            why=f"the {chosen} groups it may choose from hold {chosen} x {size} = {chosen * size}",
            fix=f"set --moe-router-group-topk {-(-model_config.moe.router_topk // size)} or lower --moe-router-topk",
        )
