"""Rules of the model section: heads, positions, experts and multi-latent attention."""

from math import ceil

from nanotrain.config.config import LoadBalancing, PositionEmbedding, RouterScore
from nanotrain.config.rules.rule import Rule, Values
from nanotrain.quantities import count_of


def channels_with_pairs(v: Values) -> int:
    """The least channels of a head, from those that are set on, of which RoPE rotates an even number."""
    rotated = max(2, v.rotary_dim + v.rotary_dim % 2)
    channels = ceil(rotated / v.rotary_percent)
    return channels + (int(channels * v.rotary_percent) < rotated)  # 100 * 0.58 is 57.99 in floating point


# fmt: off
POSITION_RULES = (
    Rule(lambda v: v.has_rope and all(v.no_rope_layers), "no layer has rotary positions",
        "no_rope_freq is {no_rope_freq}", "set --no-rope-freq 0, or --position-embedding-type none"),
    Rule(lambda v: v.window_size is not None and not any(v.window_layers),
        "no layer has the window of {window_size} keys", "window_attn_skip_freq is {window_attn_skip_freq}",
        "set --window-attn-skip-freq 0 or leave --window-size out"),
    Rule(lambda v: v.seq_length > v.max_position_embeddings,
        "seq_length {seq_length} is longer than max_position_embeddings {max_position_embeddings}",
        "the model has no positions beyond",
        "set --seq-length {max_position_embeddings} or raise --max-position-embeddings"),
)

MTP_RULES = (
    Rule(lambda v: v.mtp_num_layers and v.position_embedding_type is PositionEmbedding.learned_absolute,
        "mtp_num_layers {mtp_num_layers} with position_embedding_type learned_absolute",
        "multi-token prediction reads tokens after the last position of the table, as in Megatron-LM",
        "set --position-embedding-type rope, or leave --mtp-num-layers out"),
)

HEAD_RULES = (
    Rule(lambda v: v.kv_channels is None and v.hidden_size % v.num_attention_heads,
        "hidden_size {hidden_size} cannot be split into {num_attention_heads} heads",
        "num_attention_heads must divide it where kv_channels is unset",
        "set --num-attention-heads to a divisor or --kv-channels to the width of a head"),
    Rule(lambda v: v.num_attention_heads % v.query_groups,
        "{num_attention_heads} query heads cannot share {query_groups} key/value heads",
        "num_query_groups must divide num_attention_heads", "set --num-query-groups to a divisor"),
    Rule(lambda v: v.has_rope and not v.multi_latent_attention and (v.rotary_dim % 2 or v.rotary_dim == 0)
        and (v.kv_channels is not None or v.hidden_size % v.num_attention_heads == 0),
        "a head has {head_dim} channels, of which {rotary_dim} are rotated (rotary_percent {rotary_percent})",
        "RoPE rotates pairs of channels, so their number must be even",
        lambda v: f"set --kv-channels {channels_with_pairs(v)}, or another --num-attention-heads or --rotary-percent"),
    Rule(lambda v: v.qk_clip and v.qk_layernorm, "qk_clip with qk_layernorm",
        "queries and keys are normalized after their projections, so the size of those weights has no effect",
        "leave out --qk-clip or --qk-layernorm"),
    Rule(lambda v: v.rotary_percent > 1, "rotary_percent is {rotary_percent}",
        "it is a share of the channels of a head", "set --rotary-percent to at most 1"),
)

YARN_RULES = (
    Rule(lambda v: v.position_embedding_type is PositionEmbedding.yarn and v.rotary_scaling_factor <= 1,
        "position_embedding_type is yarn and rotary_scaling_factor is {rotary_scaling_factor}",
        "YaRN extends the context by this factor",
        "set --rotary-scaling-factor above 1, or --position-embedding-type rope"),
    Rule(lambda v: v.beta_fast <= v.beta_slow, "beta_fast {beta_fast} is not above beta_slow {beta_slow}",
        "pairs between the two rotation counts are interpolated", "set --beta-fast above --beta-slow"),
)

MLA_RULES = (
    Rule(lambda v: not v.has_rope,
        "position_embedding_type is {position_embedding_type.value} with multi_latent_attention",
        "{qk_pos_emb_head_dim} channels per head (qk_pos_emb_head_dim) are rotated",
        "set --position-embedding-type rope or yarn"),
    Rule(lambda v: v.qk_pos_emb_head_dim % 2, "qk_pos_emb_head_dim is {qk_pos_emb_head_dim}",
        "RoPE rotates pairs of channels, so their number must be even",
        lambda v: f"set --qk-pos-emb-head-dim {v.qk_pos_emb_head_dim + 1}"),
    Rule(lambda v: v.add_bias_linear, "add_bias_linear with multi_latent_attention", "its projections have no biases",
        "leave out --add-bias-linear or --multi-latent-attention"),
)

MOE_RULES = (
    Rule(lambda v: not any(v.moe_layers), "no layer has the {num_experts} experts",
        "moe_layer_freq is {moe_layer_freq}", "set --moe-layer-freq 1 or leave --num-experts out"),
    Rule(lambda v: v.moe_router_topk > v.num_experts,
        lambda v: f"a token cannot be sent to {v.moe_router_topk} of {count_of(v.num_experts, 'expert')}",
        "moe_router_topk must be at most num_experts",
        "set --moe-router-topk to at most {num_experts} or raise --num-experts"),
    Rule(lambda v: v.moe_router_score_function is RouterScore.softmax and v.moe_router_topk == 1
        and not v.moe_router_pre_softmax,
        "moe_router_topk is 1 and moe_router_pre_softmax is off",
        "a softmax over one expert is always 1, so the router would get no gradient",
        "set --moe-router-pre-softmax or --moe-router-topk 2"),
    Rule(lambda v: v.moe_router_enable_expert_bias and v.moe_router_score_function is RouterScore.softmax,
        "moe_router_enable_expert_bias with moe_router_score_function softmax",
        "the bias is added to scores that do not depend on one another",
        "set --moe-router-score-function sigmoid or leave --moe-router-enable-expert-bias out"),
    Rule(lambda v: len(v.moe_router_load_balancing_type) != 1
        and (LoadBalancing.none in v.moe_router_load_balancing_type
        or len(set(v.moe_router_load_balancing_type)) != len(v.moe_router_load_balancing_type)
        or not v.moe_router_load_balancing_type),
        lambda v: "moe_router_load_balancing_type is "
        + (" ".join(kind.value for kind in v.moe_router_load_balancing_type) or "empty"),
        "it takes none, or different losses", "name every loss once"),
    Rule(lambda v: len(v.moe_aux_loss_coeff) != len(v.moe_router_load_balancing_type),
        lambda v: f"{count_of(len(v.moe_aux_loss_coeff), 'coefficient')} (moe_aux_loss_coeff) for "
        f"{count_of(len(v.moe_router_load_balancing_type), 'load-balancing loss')}",
        "each loss has its own coefficient", lambda v: "set --moe-aux-loss-coeff to "
        f"{count_of(len(v.moe_router_load_balancing_type), 'number')}, "
        "in the order of --moe-router-load-balancing-type"),
    Rule(lambda v: v.moe_router_num_groups is None and v.moe_router_group_topk is not None,
        "moe_router_group_topk is {moe_router_group_topk} and moe_router_num_groups is unset",
        "group-limited routing needs both: the number of groups, and of the groups that a token may use",
        "set --moe-router-num-groups too, or leave both out"),
    Rule(lambda v: v.moe_router_num_groups is not None and v.moe_router_group_topk is None,
        "moe_router_num_groups is {moe_router_num_groups} and moe_router_group_topk is unset",
        "group-limited routing needs both: the number of groups, and of the groups that a token may use",
        "set --moe-router-group-topk too, or leave both out"),
    Rule(lambda v: v.num_experts % v.num_groups,
        lambda v: f"{count_of(v.num_experts, 'expert')} cannot form {count_of(v.num_groups, 'group')}",
        "moe_router_num_groups must divide num_experts", "set --moe-router-num-groups to a divisor"),
    Rule(lambda v: v.moe_router_num_groups is not None and v.group_topk > v.num_groups,
        lambda v: f"a token cannot use {v.group_topk} of {count_of(v.num_groups, 'group')}",
        "moe_router_group_topk must be at most moe_router_num_groups",
        "set --moe-router-group-topk to at most {num_groups}"),
    Rule(lambda v: v.moe_router_group_topk is not None
        and v.group_topk * v.experts_per_group < v.moe_router_topk <= v.num_experts,
        lambda v: f"a token cannot be sent to {count_of(v.moe_router_topk, 'expert')}",
        lambda v: f"it may use {count_of(v.group_topk, 'group')} of {v.experts_per_group} = "
        f"{count_of(v.group_topk * v.experts_per_group, 'expert')}",
        lambda v: f"set --moe-router-group-topk {-(-v.moe_router_topk // max(1, v.experts_per_group))} "
        "or lower --moe-router-topk"),
)
# fmt: on
