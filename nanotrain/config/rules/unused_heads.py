"""Fields of the heads of attention without effect.

A rule is an `if` and the fields that it switches off, as in `unused_model.py`.
"""

from nanotrain.config.rules.settings import Settings, UnusedFields, unused
from nanotrain.config.rules.unused_model import NO_WINDOW, WINDOW_CAUSES, has_windows


def unused_heads(c: Settings) -> UnusedFields:
    """Widths of values, key/value heads and sinks of layers with windows."""
    if c.model.multi_latent_attention:
        yield unused(
            "attention_k_eq_v",
            "value_l2_norm",
            "rotary_proportional",
            "window_kv_channels",
            "window_num_attention_heads",
            "window_rotary_percent",
            by="multi_latent_attention",
            why="multi_latent_attention has compressed keys and values",
        )
        yield unused(
            "value_channels",
            "attention_output_multiplier",
            by="multi_latent_attention",
            why="with multi_latent_attention v_head_dim gives the width of values, and its output "
            "has no factor",
        )
    if not has_windows(c):
        yield unused(
            "window_num_attention_heads",
            "window_query_groups",
            "window_kv_channels",
            "sinks_in_windows_only",
            by=WINDOW_CAUSES,
            why=NO_WINDOW,
        )
    if c.model.num_kv_shared_layers == 0:
        yield unused(
            "use_double_wide_mlp",
            by="num_kv_shared_layers",
            why="no layer reads keys of earlier layers",
        )
    elif ("shared_kv", "dense") not in zip(c.mixers, c.model.mlps, strict=False):
        yield unused(
            "use_double_wide_mlp",
            by=("num_kv_shared_layers", "num_experts", "hybrid_layer_pattern"),
            why="no layer that reads keys of an earlier one has a dense MLP",
        )
    if c.model.softmax_type != "learnable":
        yield unused("sinks_in_windows_only", by="softmax_type", why="there are no learned sinks")
    if c.model.linear_attention_type != "attention_mamba2":
        yield unused(
            "mamba_output_multiplier",
            by="linear_attention_type",
            why="it belongs to linear_attention_type attention_mamba2",
        )
    if c.model.sparse_attention_type == "dsa":
        yield unused(
            "attention_output_gate",
            by="sparse_attention_type",
            why="the output of sparse attention has no gate",
        )
    if not c.model.attention_output_gate:
        yield unused(
            "attention_output_gate_per_head",
            "attention_output_gate_activation",
            by="attention_output_gate",
            why="the output of attention has no gate",
        )
