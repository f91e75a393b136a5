"""Random words of stochastic rounding in NVFP4: each stage begins its microbatch with them.

Layers learn their global names and channels, so that the words are those of one rank in every
layout (kernels/fp8/rounding.py).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from nanotrain.kernels.fp8.layer import Fp8Layer
from nanotrain.kernels.fp8.rounding import LayerKey, RoundingWords
from nanotrain.model.context import BatchContext
from nanotrain.precision.fp8 import RECIPES
from nanotrain.spec.params import LocalParam
from nanotrain.train.parts.part import BuiltModel, StepPart


class StochasticRounding(StepPart):
    """Gives the layers of this rank's stages their random words for stochastic rounding."""

    def __init__(self, model: BuiltModel) -> None:
        for stage in model.plan.stages:
            params = {param.spec.name: param for param in stage.params}
            module = model.stages[stage.spec.index]
            layers = name_layers(module, params)
            if layers:
                # the layers of a stage share one object
                words = layers[0].options.rounding
                start = partial(_start_microbatch, words=words, seed=model.config.train.seed)
                module.register_forward_pre_hook(start)

    @staticmethod
    def is_enabled(model: BuiltModel) -> bool:
        fp8 = model.config.precision.fp8
        return fp8 is not None and RECIPES[fp8.recipe].is_two_level


def name_layers(stage: nn.Module, params: Mapping[str, LocalParam]) -> list[Fp8Layer]:
    """Give each layer the key of its weight; returns the layers of the stage."""
    layers = []
    for name, module in stage.named_modules():
        layer = getattr(module, "fp8", None)
        if not isinstance(layer, Fp8Layer):
            continue
        param = params[f"{name}.weight"]
        rows: slice | None = getattr(module, "rows", None)
        first = param.box.start[-2] + (0 if rows is None else rows.start)
        layer.key = LayerKey.of(param.spec.name, first_channel=first)
        layers.append(layer)
    return layers


def _start_microbatch(
    _: nn.Module, inputs: tuple[Any, BatchContext], *, words: RoundingWords, seed: int
) -> None:
    """Begin a microbatch before the forward of a stage; nothing without sample indices."""
    batch = inputs[1].batch
    if batch.sample_ids is None:
        return
    positions = inputs[1].sequence_positions
    if positions is None:
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    words.start(seed, sample_ids=batch.sample_ids, positions=positions)
