"""The masks of a microbatch are planned for the layers of a stage that read them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nanotrain.config.layer_kinds import LinearAttentionConfig
from nanotrain.data.batch import Batch
from nanotrain.model.context import MaskPlanner, ModelParallel
from tests.model.building import LLAMA

WINDOWS = replace(LLAMA, window_size=3, window_attn_skip_freq="2")  # in the first of two layers
CHUNKS = replace(WINDOWS, window_size=None, attention_chunk_size=4)
WITHOUT_KEYS = replace(
    LLAMA, linear_attention_type="short_conv", linear_attention=LinearAttentionConfig()
)


class Recorder:
    """A core attention whose masks are the arguments they are planned with."""

    def plan_mask(
        self, segment_ids: Tensor | None, *, tokens: Tensor, window: int | None = None
    ) -> object:
        return (None if segment_ids is None else segment_ids.tolist(), window)


@pytest.mark.parametrize(
    ("model_config", "layers", "full", "windowed"),
    [
        (LLAMA, (0, 1), (None, None), None),
        (WINDOWS, (0, 1), (None, None), (None, 3)),
        (WINDOWS, (0,), None, (None, 3)),
        (WINDOWS, (1,), (None, None), None),
        (CHUNKS, (0,), None, ([[0, 0, 0, 0, 4, 4]], 4)),
        (WITHOUT_KEYS, (0, 1), None, None),
    ],
)
def test_masks_are_planned_where_a_layer_needs_them(model_config, layers, full, windowed) -> None:
    parallel = replace(ModelParallel.single_rank(), core_attention=Recorder())
    batch = Batch.from_tokens(torch.zeros(1, 6, dtype=torch.int64))
    masks = MaskPlanner.of(model_config, layers).plan(batch, parallel)
    assert (masks.full, masks.windowed) == (full, windowed)
