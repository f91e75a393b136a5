"""Model sections that describe the same model.

free_keys                    keys of the section that do not depend on the weights
changed_positions            settings of rotary positions that a run changes for longer contexts
resolved                     the same model with derived sizes set
canonical                    the same model in one form, so that equal models compare equal
write_layers, mixed_layers   the pattern of some layers
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from nanotrain.config.config import Config
from nanotrain.config.layer_kinds import (
    CompressedAttentionConfig,
    DSAConfig,
    LinearAttentionConfig,
    MLAConfig,
)
from nanotrain.config.model import ModelConfig, MoEConfig
from nanotrain.config.mup import without_mup
from nanotrain.config.notation import write_pattern
from nanotrain.config.rules.unused import reset_unused
from nanotrain.config.schema import KEYS, value_of
from nanotrain.errors import ErrorCollector
from nanotrain.interop.hf.tables import read_tables
from nanotrain.spec.shape import ModelShape


def free_keys(model_config: ModelConfig) -> tuple[str, ...]:
    """Keys of the model section that do not depend on the weights."""
    tables = read_tables()
    keys = list(tables["free_keys"])
    if model_config.moe:
        keys += tables["free_expert_keys"]
    if model_config.dsa:
        keys += tables["free_dsa_keys"]
    return tuple(keys)


def changed_positions(
    described: ModelConfig, configured: ModelConfig, *, explicit: Collection[str]
) -> dict[str, Any]:
    """The settings of rotary positions that the configuration changes, by key.

    Args:
        described: the model of the weights.
        configured: the model section of the configuration.
        explicit: keys of the section that the command line sets.
    """
    kinds = {described.position_embedding_type, configured.position_embedding_type}
    if not kinds <= {"rope", "yarn", "longrope"}:
        return {}
    changed = {}
    for key in read_tables()["rotary_keys"]:
        value = value_of(configured, key)
        if key in explicit and value != value_of(described, key):
            changed[key] = value
    return changed


def resolved(model_config: ModelConfig) -> ModelConfig:
    """The same model with derived sizes set."""
    model_config = without_mup(model_config)
    shape = ModelShape.of(model_config)
    moe = model_config.moe
    if moe is not None:
        moe = replace(moe, ffn_hidden_size=shape.moe_ffn_size)
    return replace(
        model_config,
        num_query_groups=shape.query_groups,
        kv_channels=shape.head_dim,
        value_channels=None if model_config.mla else shape.value_head_dim,
        ffn_hidden_size=shape.ffn_size,
        moe=moe,
    )


def canonical(model_config: ModelConfig) -> ModelConfig:
    """The same model with derived sizes resolved and fields without effect at their defaults."""
    # a field that is wrong in itself keeps its value: the errors are not raised
    config, _ = reset_unused(
        Config(model=model_config),
        explicit=frozenset(),
        errors=ErrorCollector(),
        defaults=frozenset(KEYS),
    )
    model_config = resolved(config.model)
    shape = ModelShape.of(model_config)
    epsilon = model_config.norm_epsilon
    pattern = model_config.hybrid_layer_pattern
    return replace(
        model_config,
        hybrid_layer_pattern=None if pattern is None else pattern.replace("|", ""),
        ffn_hidden_size=None if all(shape.moe_layers) else shape.ffn_size,
        mtp=replace(
            model_config.mtp,
            num_layers=shape.num_mtp_predictions or None,
            use_repeated_layer=shape.num_mtp_layers < shape.num_mtp_predictions,
        ),
        moe=_canonical_moe(model_config, shape),
        dsa=_canonical_dsa(model_config),
        compressed=_canonical_compressed(model_config),
        mla=_canonical_mla(model_config.mla, epsilon=epsilon),
        linear_attention=_canonical_linear(model_config.linear_attention, epsilon=epsilon),
        softmax_scale=_canonical_scale(model_config, shape),
        rotary_base_local=_canonical_local_base(model_config),
        window_num_attention_heads=_other_than(
            model_config.num_attention_heads, model_config.window_num_attention_heads
        ),
        window_rotary_percent=_other_than(
            model_config.rotary_percent, model_config.window_rotary_percent
        ),
        no_rope_freq=write_layers(model_config.no_rope_layers),
        linear_attention_freq=_canonical_linear_layers(model_config, shape),
        window_attn_skip_freq=mixed_layers(model_config.window_layers),
    )


def write_layers(layers: Sequence[bool]) -> str:
    """The pattern of the layers for which the value is true; "0" if there are none."""
    return write_pattern(tuple(layers)) if any(layers) else "0"


def mixed_layers(layers: Sequence[bool]) -> str:
    """The pattern of the layers for which the value is true; "0" if all layers have one value."""
    return "0" if all(layers) else write_layers(layers)


def _canonical_moe(model_config: ModelConfig, shape: ModelShape) -> MoEConfig | None:
    """The expert section with explicit sizes and layers; None if no layer has experts."""
    if shape.moe is None or not any(shape.moe_layers):
        return None
    return replace(
        shape.moe,
        ffn_hidden_size=shape.moe_ffn_size,
        layer_freq=write_pattern(shape.moe_layers),
        hash_layers=write_layers(model_config.hash_layers),
    )


def _canonical_dsa(model_config: ModelConfig) -> DSAConfig | None:
    """The section of sparse attention with one pattern for the layers without an indexer."""
    if model_config.dsa is None:
        return None
    return replace(model_config.dsa, share_freq=write_layers(model_config.shared_selections))


def _canonical_compressed(model_config: ModelConfig) -> CompressedAttentionConfig | None:
    """The section of compressed attention with a letter per layer."""
    if model_config.compressed is None:
        return None
    return replace(model_config.compressed, layer_pattern=model_config.compressed_pattern)


def _canonical_mla(mla: MLAConfig | None, *, epsilon: float) -> MLAConfig | None:
    """The MLA section, with the epsilon of its norms unset if it equals `epsilon` of all norms."""
    if mla is not None and mla.compressed_norm_epsilon == epsilon:
        return replace(mla, compressed_norm_epsilon=None)
    return mla


def _canonical_linear(
    linear: LinearAttentionConfig | None, *, epsilon: float
) -> LinearAttentionConfig | None:
    """The section, with the epsilon of its norms unset if it equals `epsilon` of all norms."""
    if linear is not None and linear.norm_epsilon == epsilon:
        return replace(linear, norm_epsilon=None)
    return linear


def _canonical_scale(model_config: ModelConfig, shape: ModelShape) -> float | None:
    """The scale of attention scores; None if it is the default 1 / sqrt(head_dim)."""
    scale = model_config.softmax_scale
    if scale is not None and math.isclose(scale, shape.head_dim**-0.5):
        return None
    return scale


def _other_than(value: Any, own: Any) -> Any:
    """A setting of layers with a window; None where it is the value of all layers."""
    return None if own == value else own


def _canonical_local_base(model_config: ModelConfig) -> float | None:
    """The rotary base of layers with a window; None where they rotate as all other layers do.

    Positions with the local base are neither scaled nor interpolated, so the same base can still
    mean other positions.
    """
    local = model_config.rotary_base_local
    longer = (model_config.yarn, model_config.longrope)
    is_scaled = model_config.use_rope_scaling or longer != (None, None)
    is_interpolated = model_config.rotary_seq_len_interpolation_factor != 1
    if local == model_config.rotary_base and not is_scaled and not is_interpolated:
        return None
    return local


def _canonical_linear_layers(model_config: ModelConfig, shape: ModelShape) -> str:
    """The pattern of layers with linear attention; "0" if a hybrid pattern states them."""
    if model_config.hybrid_layer_pattern is not None:
        return "0"
    kind = model_config.linear_attention_type
    return mixed_layers([mixer is not None and mixer == kind for mixer in shape.mixers])
