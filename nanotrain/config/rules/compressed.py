"""Rules of attention to a window and to compressed keys (DeepSeek-V4), and of experts by token."""

from nanotrain.config.rules.settings import Errors, Settings
from nanotrain.config.schema import typed
from nanotrain.errors import ConfigError
from nanotrain.quantities import count_of, round_up

KIND = "sparse_attention_type compressed"


def check_compressed_attention(c: Settings) -> Errors:
    """Check sizes of attention to compressed keys."""
    model = c.model
    if model.sparse_attention_type != "compressed":
        return
    if model.window_size is None:
        yield ConfigError(
            f"{KIND} and window_size is unset",
            why="beside compressed keys a query attends to the keys of a window",
            fix="set --window-size, 127 in DeepSeek-V4",
        )
    if model.query_groups != 1:
        yield ConfigError(
            f"{KIND} with {count_of(model.query_groups, 'key/value head')}",
            why="all heads share one key, which is their value too",
            fix="set --num-query-groups 1",
        )
    if model.num_attention_heads % c.compressed.output_groups != 0:
        yield ConfigError(
            f"{count_of(model.num_attention_heads, 'head')} cannot form "
            f"{count_of(c.compressed.output_groups, 'group')} (compressed_output_groups)",
            why="the first output projection has as many heads in every group",
            fix="set --compressed-output-groups to a divisor",
        )
    rotary = model.rotary_dim
    if model.has_rope and c.dsa.head_dim < rotary:
        yield ConfigError(
            f"dsa_indexer_head_dim {c.dsa.head_dim} is below {rotary} rotary channels of a head",
            why=f"the last {rotary} channels of an index head are rotary",
            fix=f"set --dsa-indexer-head-dim to at least {rotary}",
        )


def check_settings_beside_compressed(c: Settings) -> Errors:
    """Check settings of attention that compressed attention does not have."""
    model = c.model
    if model.sparse_attention_type != "compressed":
        return
    others = {
        "multi_latent_attention": model.multi_latent_attention,
        "linear_attention_type": model.linear_attention_type is not None,
        "hybrid_layer_pattern": model.hybrid_layer_pattern is not None,
        "num_kv_shared_layers": model.num_kv_shared_layers > 0,
        "attention_chunk_size": model.attention_chunk_size is not None,
        "attention_output_gate": model.attention_output_gate,
        "attention_k_eq_v": model.attention_k_eq_v,
        "attention_output_multiplier": model.attention_output_multiplier != 1.0,
        "value_channels": model.value_channels is not None,
        "value_l2_norm": model.value_l2_norm,
        "window_kv_channels": model.window_kv_channels is not None,
        "window_num_attention_heads": model.window_num_attention_heads is not None,
        "window_rotary_percent": model.window_rotary_percent is not None,
        "window_query_groups": model.window_query_groups is not None,
        "sinks_in_windows_only": model.sinks_in_windows_only,
        "qk_layernorm": model.qk_layernorm,
        "qk_l2_norm": model.qk_l2_norm,
        "qk_clip": c.optim.qk_clip,
        "softmax_scale": model.softmax_scale is not None,
        "attn_scale": model.attn_scale > 0,
        "no_rope_freq": any(model.no_rope_layers),
        "position_embedding_type learned_absolute or none": not model.has_rope,
        "rotary_proportional": model.rotary_proportional,
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.add_qkv_bias,
        "add_attention_output_bias": model.add_attention_output_bias,
        "mtp_num_layers": bool(c.mtp.num_layers),
        "fp8_format": c.has_fp8,
    }
    names = [name for name, is_used in others.items() if is_used]
    if names:
        yield ConfigError(
            f"{KIND} with {', '.join(names)}",
            why="it has queries, keys, norms and projections of its own, without these",
            fix="leave them out",
        )


def check_hash_layers(c: Settings) -> Errors:
    """Layers in which the token id chooses the experts."""
    if not c.has_experts or not any(c.model.hash_layers):
        return
    others = {
        "moe_shortcut": c.moe.shortcut,
        "moe_num_zero_experts": c.moe.num_zero_experts > 0,
        "moe_router_num_groups": c.moe.router_num_groups is not None,
        "moe_router_force_load_balancing": c.moe.router_force_load_balancing,
        "mtp_num_layers": bool(c.mtp.num_layers),
        "cuda_graph_impl": c.train.cuda_graph_impl != "none",
    }
    names = [name for name, is_used in others.items() if is_used]
    if names:
        yield ConfigError(
            f"moe_hash_layers {typed(c.moe.hash_layers)} with {', '.join(names)}",
            why="a table of the tokens chooses the experts there, as in DeepSeek-V4",
            fix="leave them out",
        )


def check_compressed_layout(c: Settings) -> Errors:
    """Check attention to compressed keys over ranks."""
    if c.model.sparse_attention_type != "compressed":
        return
    groups = c.compressed.output_groups
    if groups % c.tp != 0:
        yield ConfigError(
            f"{count_of(groups, 'group')} of heads (compressed_output_groups) over tp={c.tp} ranks",
            why="a rank has whole groups of heads",
            fix=f"set --compressed-output-groups {round_up(groups, c.tp)}, or "
            "--tensor-model-parallel-size to a divisor",
        )
