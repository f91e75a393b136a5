"""Rules of the model section: heads with and without a window, and keys that layers share.

A rule is an `if` and the error that it yields, as in `model.py`.
"""

from nanotrain.config.rules.settings import Errors, Settings
from nanotrain.errors import ConfigError
from nanotrain.quantities import count_of


def check_window_heads(c: Settings) -> Errors:
    """Check query and key/value heads of layers with a window."""
    model = c.model
    own = model.window_num_attention_heads
    groups = model.window_query_groups
    num_heads = own or model.num_attention_heads
    if own is not None and groups is None and num_heads % model.query_groups != 0:
        yield ConfigError(
            f"{num_heads} query heads of layers with a window cannot share {model.query_groups} "
            "key/value heads",
            why="num_query_groups must divide window_num_attention_heads",
            fix="set --window-num-attention-heads to a multiple",
        )
    if groups is not None and num_heads % groups != 0:
        yield ConfigError(
            f"{num_heads} query heads cannot share {groups} key/value heads of layers with a "
            "window",
            why="window_query_groups must divide num_attention_heads",
            fix="set --window-query-groups to a divisor",
        )
    if own is not None:
        yield from _check_alike(c, f"window_num_attention_heads {own}")
    if groups is not None:
        yield from _check_alike(c, f"window_query_groups {groups}")


def _check_alike(c: Settings, what: str) -> Errors:
    """Settings for which all layers have the same heads."""
    flag = "--" + what.split()[0].replace("_", "-")
    if c.optim.qk_clip:
        yield ConfigError(
            f"qk_clip with {what}",
            why="heads that share a key are clipped alike, and layers have other numbers of them",
            fix=f"leave out --qk-clip or {flag}",
        )
    if c.has_fp8:
        yield ConfigError(
            f"fp8 with {what}",
            why="which sizes fp8 can multiply is checked for layers that are alike",
            fix=f"leave out --fp8-format or {flag}",
        )


def check_shared_keys(c: Settings) -> Errors:
    """Check keys and values of earlier layers."""
    num_shared = c.model.num_kv_shared_layers
    if num_shared == 0:
        return
    what = f"num_kv_shared_layers {num_shared}"
    first = c.model.num_layers - num_shared
    missing = [layer for layer in c.model.unshared_layers if layer >= first]
    if first <= 0:
        yield ConfigError(
            f"{what} of {count_of(c.model.num_layers, 'layer')}",
            why="the first layers compute the keys and values that the last ones read",
            fix=f"set --num-kv-shared-layers to at most {c.model.num_layers - 1}",
        )
    elif missing:
        yield ConfigError(
            f"{what}, and no layer before layer {first} has the keys of layer {missing[0]}",
            why="a layer reads keys and values of the last earlier layer of its type: with or "
            "without a window, with or without rotary positions",
            fix="set a smaller --num-kv-shared-layers, or another --window-attn-skip-freq or "
            "--no-rope-freq",
        )
    elif "shared_kv" not in c.mixers:
        yield ConfigError(
            f"{what}, and none of these layers has attention with keys of its heads",
            why="MLPs of a pattern, and layers of multi_latent_attention and of "
            "linear_attention_type, share no keys",
            fix="leave --num-kv-shared-layers out, or set another one",
        )


def check_shared_key_settings(c: Settings) -> Errors:
    """Check settings that do not work with keys and values of earlier layers."""
    what = f"num_kv_shared_layers {c.model.num_kv_shared_layers}"
    if c.model.num_kv_shared_layers == 0:
        return
    if c.mtp.num_layers:
        yield ConfigError(
            f"{what} with mtp_num_layers {c.mtp.num_layers}",
            why="layers of multi-token prediction are like the last layer, which has no keys of "
            "its own",
            fix="leave --num-kv-shared-layers or --mtp-num-layers out",
        )
    if c.optim.qk_clip:
        yield ConfigError(
            f"{what} with qk_clip",
            why="the largest logit of a key is that of all layers that read it",
            fix="leave --num-kv-shared-layers or --qk-clip out",
        )
    if c.memory.cpu_offloading:
        yield ConfigError(
            f"{what} with cpu_offloading",
            why="keys and values stay on the device until the last layer that reads them",
            fix="leave --num-kv-shared-layers or --cpu-offloading out",
        )


def check_shared_selections(c: Settings) -> Errors:
    """Layers that attend to the selection of an earlier indexer."""
    shares = c.model.shared_selections
    if c.model.sparse_attention_type != "dsa" or not any(shares):
        return
    what = f"dsa_indexer_share_freq {c.dsa.share_freq}"
    mixers = c.model.mixers
    first = mixers.index("dsa") if "dsa" in mixers else 0
    others = c.model.num_layers - first - 1
    if shares[first]:
        yield ConfigError(
            f"{what}, and layer {first} is the first with sparse attention",
            why="no earlier layer has an indexer whose selection it could read",
            fix=f"set --dsa-indexer-share-freq [0]*{first + 1}+[1]*{others}",
        )
    if c.optim.freeze or c.optim.train_only:
        yield ConfigError(
            f"{what} with freeze or train_only",
            why="layers without an indexer do not know whether that of an earlier layer warms up, "
            "in which attention is to all keys",
            fix="leave out --dsa-indexer-share-freq, or --freeze and --train-only",
        )
    if c.memory.cpu_offloading:
        yield ConfigError(
            f"{what} with cpu_offloading",
            why="a selection stays on the device until the last layer that reads it",
            fix="leave --dsa-indexer-share-freq or --cpu-offloading out",
        )


def check_heads_of_kinds(c: Settings) -> Errors:
    """Check widths of heads with and without a window, and values that are keys."""
    model = c.model
    channels = model.window_kv_channels
    percent = model.window_rotary_percent
    has_pairs = model.window_rotary_dim % 2 == 0
    if channels is not None and model.has_rope and not has_pairs:
        yield ConfigError(
            f"window_kv_channels {channels}, of which {model.window_rotary_dim} are rotated",
            why="RoPE rotates pairs of channels, so their number must be even",
            fix=f"set --window-kv-channels {channels + 1}, or another --rotary-percent",
        )
    elif percent is not None and (percent > 1 or not has_pairs or model.window_rotary_dim == 0):
        yield ConfigError(
            f"window_rotary_percent {percent} of {model.window_head_dim} channels",
            why="it is the share of the channels of a head that RoPE rotates in pairs",
            fix="set --window-rotary-percent to at most 1, and so that their number is even",
        )
    if c.has_fp8 and channels is not None:
        yield ConfigError(
            f"fp8 with window_kv_channels {channels}",
            why="which sizes fp8 can multiply is checked for layers that are alike",
            fix="leave out --fp8-format or --window-kv-channels",
        )
    if not model.attention_k_eq_v:
        return
    if model.value_channels not in (None, model.head_dim):
        yield ConfigError(
            f"attention_k_eq_v with value_channels {model.value_channels}",
            why=f"values that are keys have {model.head_dim} channels",
            fix="leave out --attention-k-eq-v or --value-channels",
        )
    if all(model.window_layers):
        yield ConfigError(
            "attention_k_eq_v, and every layer has a window",
            why="values are keys in layers without a window",
            fix="leave out --attention-k-eq-v, or set --window-attn-skip-freq",
        )
    if c.optim.qk_clip:
        yield ConfigError(
            "qk_clip with attention_k_eq_v",
            why="a key that is scaled down would scale its value too",
            fix="leave out --qk-clip or --attention-k-eq-v",
        )


def check_layer_inputs(c: Settings) -> Errors:
    """Inputs per layer fit some kinds of layers only."""
    model = c.model
    if not model.layer_input_size:
        return
    what = f"layer_input_size {model.layer_input_size}"
    has_halves = model.hybrid_layer_pattern is not None
    has_shortcuts = c.has_experts and c.moe.shortcut
    if has_halves or has_shortcuts or model.residual_type != "plain":
        yield ConfigError(
            f"{what} with hybrid_layer_pattern, moe_shortcut or another residual_type",
            why="the input of a layer follows one attention and one MLP",
            fix="leave --layer-input-size out",
        )
    if c.mtp.num_layers:
        yield ConfigError(
            f"{what} with mtp_num_layers {c.mtp.num_layers}",
            why="only layers of the model have inputs of their own",
            fix="leave --layer-input-size or --mtp-num-layers out",
        )
    if model.activation == "xielu":
        yield ConfigError(
            f"{what} with activation xielu",
            why="its weights are those of dense MLPs, and the gate of an input has none",
            fix="choose another --activation or leave --layer-input-size out",
        )


def check_layer_scale(c: Settings) -> Errors:
    """Check the factor of hidden states after a layer."""
    model = c.model
    if not model.layer_scale:
        return
    if model.hybrid_layer_pattern is not None or (c.has_experts and c.moe.shortcut):
        yield ConfigError(
            "layer_scale with hybrid_layer_pattern or moe_shortcut",
            why="the factor follows one attention and one MLP",
            fix="leave --layer-scale out",
        )
