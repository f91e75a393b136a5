"""Maximal update parametrization (muP): the factors of a model that is wider than a narrow one.

Settings that were found for the narrow model then hold for the wide one. The optimizer has factors
too: `optim/rule.py`.

Yang et al. 2022, "Tensor Programs V"; the settings and their meaning are Megatron-LM's.
"""

from dataclasses import replace
from math import sqrt

from nanotrain.config.model import ModelConfig


def width_multiplier(model_config: ModelConfig) -> float:
    """How many times wider the model is than the narrow one.

    >>> width_multiplier(ModelConfig(hidden_size=256, use_mup=True, mup_base_hidden_size=64))
    4.0
    """
    if not model_config.use_mup or model_config.mup_base_hidden_size is None:
        return 1.0
    return model_config.hidden_size / model_config.mup_base_hidden_size


def score_scale(model_config: ModelConfig) -> float | None:
    """The factor on the scores of softmax attention; None for 1 / sqrt(channels of a head)."""
    scale = model_config.softmax_scale
    if scale is not None or not model_config.use_mup or model_config.mla is not None:
        return scale
    base_scale = sqrt(model_config.mup_base_head_dim or 1)
    divisor: float = model_config.head_dim**model_config.mup_attn_scale_power
    return base_scale / divisor


def logits_divisor(model_config: ModelConfig) -> float:
    """The divisor of the logits.

    >>> model = ModelConfig(hidden_size=256, use_mup=True, mup_base_hidden_size=64)
    >>> logits_divisor(model), logits_divisor(replace(model, mup_output_mult=0.5))
    (4.0, 2.0)
    """
    divisor = model_config.logits_scaling
    if not model_config.use_mup:
        return divisor
    if model_config.mup_output_mult != 1:
        return divisor / model_config.mup_output_mult
    return divisor * width_multiplier(model_config)


def without_mup(model_config: ModelConfig) -> ModelConfig:
    """The same model without muP: its settings have the factors that muP computes."""
    if not model_config.use_mup:
        return model_config
    plain = ModelConfig()
    return replace(
        model_config,
        use_mup=plain.use_mup,
        mup_base_hidden_size=plain.mup_base_hidden_size,
        mup_base_head_dim=plain.mup_base_head_dim,
        mup_attn_scale_power=plain.mup_attn_scale_power,
        mup_embedding_mult=plain.mup_embedding_mult,
        mup_output_mult=plain.mup_output_mult,
        softmax_scale=score_scale(model_config),
        logits_scaling=logits_divisor(model_config),
        embedding_multiplier=model_config.embedding_multiplier * model_config.mup_embedding_mult,
    )
