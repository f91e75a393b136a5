"""The largest attention logits of every head, counted on the device during forward passes.

`train/parts/qk_clip.py` uses them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanotrain.attention.call import largest_logits
from nanotrain.attention.chunks import AttentionChunk
from nanotrain.comm.autograd import eager
from nanotrain.model.parallel import ModelParallel
from nanotrain.model.router_stats import StatefulModule
from nanotrain.spec.shape import ModelShape


class MaxLogits(StatefulModule):
    """The largest attention logit of each query head of this rank since the last collection.

    Attributes:
        largest: [N / tp] fp32, minus infinity before the first microbatch.
        peak: fp32 scalar, the largest of all heads since it was last logged.
    """

    largest: Tensor
    peak: Tensor

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.register_buffer("largest", torch.full((num_heads,), -torch.inf), persistent=False)
        self.register_buffer("peak", torch.tensor(-torch.inf), persistent=False)

    def observe(self, chunk: AttentionChunk, *, first_head: int = 0) -> None:
        """Count the logits of a chunk; as `LogitObserver`."""
        heads = self.largest[first_head : first_head + chunk.query.shape[1]]
        found = largest_logits(chunk)
        torch.maximum(heads, found, out=heads)
        torch.maximum(self.peak, found.amax(), out=self.peak)


def build_core(parallel: ModelParallel, shape: ModelShape) -> tuple[MaxLogits | None, Callable[..., Tensor]]:
    """The core attention of a layer, and its `MaxLogits` if logits are tracked.

    Logits are tracked in training, not in evaluation, and only once if the core attention is recomputed.
    """
    core, recompute = parallel.core_attention, parallel.recompute
    if not parallel.tracks_logits:
        return None, core
    logits = MaxLogits(shape.num_heads // parallel.tp.group.size)

    @eager
    def run(query: Tensor, *, key: Tensor, value: Tensor, mask: object, **options: Any) -> Tensor:
        is_counted = torch.is_grad_enabled() and not recompute.is_recomputing
        return core(query, key=key, value=value, mask=mask, observe=logits.observe if is_counted else None, **options)

    return logits, run
