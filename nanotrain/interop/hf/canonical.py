"""Model sections that describe the same model: `canonical` makes them equal, `resolved` sets
derived sizes.
"""

import math
from dataclasses import replace

from nanotrain.config.config import Config
from nanotrain.config.model import ModelConfig
from nanotrain.config.notation import write_pattern
from nanotrain.config.rules.unused import reset_unused
from nanotrain.config.schema import KEYS
from nanotrain.errors import ErrorCollector
from nanotrain.interop.hf.tables import read_tables
from nanotrain.spec.shape import ModelShape


def free_keys(model_config: ModelConfig) -> tuple[str, ...]:
    """Keys of the model section that do not depend on the weights."""
    tables = read_tables()
    of_sections = {"free_expert_keys": model_config.moe, "free_dsa_keys": model_config.dsa}
    return (
        *tables["free_keys"],
        *(key for name, section in of_sections.items() if section for key in tables[name]),
    )


def resolved(model_config: ModelConfig) -> ModelConfig:
    """The same model with derived sizes set."""
    shape, moe = ModelShape.of(model_config), model_config.moe
    return replace(
        model_config,
        num_query_groups=shape.query_groups,
        kv_channels=shape.head_dim,
        value_channels=None if model_config.mla else shape.value_head_dim,
        ffn_hidden_size=shape.ffn_size,
        moe=moe and replace(moe, ffn_hidden_size=shape.moe_ffn_size),
    )


def canonical(model_config: ModelConfig) -> ModelConfig:
    """The same model with derived sizes resolved and fields without effect (`unused.yaml`) at their
    defaults.
    """
    # what is wrong in itself keeps its value
    config, errors = Config(model=model_config), ErrorCollector()
    config, _ = reset_unused(config, explicit=frozenset(), errors=errors, defaults=frozenset(KEYS))
    model_config = resolved(config.model)
    shape = ModelShape.of(model_config)
    moe = shape.moe if any(shape.moe_layers) else None
    if moe is not None:
        moe = replace(
            moe, ffn_hidden_size=shape.moe_ffn_size, layer_freq=write_pattern(shape.moe_layers)
        )
    scale, local = model_config.softmax_scale, model_config.rotary_base_local
    is_usual = scale is not None and math.isclose(scale, shape.head_dim**-0.5)
    is_scaled = (
        model_config.use_rope_scaling or model_config.rotary_seq_len_interpolation_factor != 1
    )
    is_shared = local == model_config.rotary_base and not is_scaled and model_config.yarn is None
    without, windows = model_config.no_rope_layers, model_config.window_layers
    linear = tuple(
        mixer is not None and mixer == model_config.linear_attention_type for mixer in shape.mixers
    )
    is_mixed = any(linear) and not all(linear) and model_config.hybrid_layer_pattern is None
    epsilon, mla, linear_sizes = (
        model_config.norm_epsilon,
        model_config.mla,
        model_config.linear_attention,
    )
    if mla is not None and mla.compressed_norm_epsilon == epsilon:
        mla = replace(mla, compressed_norm_epsilon=None)
    if linear_sizes is not None and linear_sizes.norm_epsilon == epsilon:
        linear_sizes = replace(linear_sizes, norm_epsilon=None)
    has_all_windows = all(windows) or not any(windows)
    pattern = model_config.hybrid_layer_pattern
    return replace(
        model_config,
        hybrid_layer_pattern=None if pattern is None else pattern.replace("|", ""),
        ffn_hidden_size=None if all(shape.moe_layers) else shape.ffn_size,
        mtp=replace(model_config.mtp, num_layers=shape.num_mtp_layers or None),
        moe=moe,
        mla=mla,
        linear_attention=linear_sizes,
        softmax_scale=None if is_usual else scale,
        rotary_base_local=None if is_shared else local,
        no_rope_freq=write_pattern(without) if any(without) else "0",
        linear_attention_freq=write_pattern(linear) if is_mixed else "0",
        window_attn_skip_freq="0" if has_all_windows else write_pattern(windows),
    )
