"""Rules of the model section: heads, positions, experts and multi-latent attention."""

from math import ceil

from nanotrain.config.config import LoadBalancing
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
)

MLA_RULES = (
    Rule(lambda v: v.qk_pos_emb_head_dim % 2, "qk_pos_emb_head_dim is {qk_pos_emb_head_dim}",
        "RoPE rotates pairs of channels, so their number must be even",
        lambda v: f"set --qk-pos-emb-head-dim {v.qk_pos_emb_head_dim + 1}"),
)

MOE_RULES = (
    Rule(lambda v: not any(v.moe_layers), "no layer has the {num_experts} experts",
        "moe_layer_freq is {moe_layer_freq}", "set --moe-layer-freq 1 or leave --num-experts out"),
    Rule(lambda v: v.moe_router_topk > v.num_experts,
        lambda v: f"a token cannot be sent to {v.moe_router_topk} of {count_of(v.num_experts, 'expert')}",
        "moe_router_topk must be at most num_experts",
        "set --moe-router-topk to at most {num_experts} or raise --num-experts"),
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
