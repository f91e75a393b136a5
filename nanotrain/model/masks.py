"""The attention masks of a microbatch, one for the layers with a window and one for the others."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nanotrain.attention.tiles import chunk_segments
from nanotrain.config.model import ModelConfig
from nanotrain.data.batch import Batch
from nanotrain.model.context import ModelParallel
from nanotrain.spec.kinds import MIXERS
from nanotrain.spec.shape import ModelShape


@dataclass(frozen=True)
class AttentionMasks:
    """Results of `CoreAttention.plan_mask`; None also where no layer needs the mask."""

    full: Any  # layers that attend to all earlier keys
    windowed: Any  # layers that attend within a window or a chunk


@dataclass(frozen=True)
class MaskPlanner:
    """Plans the masks of a stage."""

    has_full: bool  # whether a layer attends to all earlier keys
    has_windowed: bool  # whether a layer attends within a window or a chunk
    window: int | None  # earlier keys in the window
    chunk: int | None  # positions of a chunk

    @classmethod
    def of(cls, model_config: ModelConfig, layers: Iterable[int]) -> "MaskPlanner":
        """The planner of some layers of a model."""
        shape = ModelShape.of(model_config)
        has_full = has_windowed = False
        for layer in layers:
            mixer, _ = shape.kinds(layer)
            if mixer is None or not MIXERS[mixer].has_keys:
                continue
            if shape.has_window(layer):
                has_windowed = True
            else:
                has_full = True
        return cls(
            has_full, has_windowed, model_config.window_size, model_config.attention_chunk_size
        )

    def plan(self, batch: Batch, parallel: ModelParallel) -> AttentionMasks:
        """The masks of a microbatch of this rank."""
        core = parallel.core_attention
        full = windowed = None
        if self.has_full:
            full = core.plan_mask(batch.segment_ids, tokens=batch.tokens)
        if self.has_windowed and self.chunk is None:
            windowed = core.plan_mask(batch.segment_ids, tokens=batch.tokens, window=self.window)
        if self.has_windowed and self.chunk is not None:
            length = batch.tokens.shape[1] * parallel.cp.size
            chunks = chunk_segments(batch.segment_ids, length=length, size=self.chunk)
            windowed = core.plan_mask(chunks, tokens=batch.tokens, window=self.chunk)
        return AttentionMasks(full, windowed)
