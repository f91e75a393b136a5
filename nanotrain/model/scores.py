"""Scores of an attention layer.

LayerScores   softcap, sink and dropout, per microbatch
MaxLogits     the largest logits of every head, counted on the device during forward passes (train/parts/qk_clip.py)
"""

import torch
from torch import Tensor

from nanotrain.attention.call import largest_logits
from nanotrain.attention.chunks import AttentionChunk, ScoreOptions, WeightDropout
from nanotrain.config.config import ModelConfig, SoftmaxType
from nanotrain.memory.recompute import Recompute
from nanotrain.model.context import LayerContext
from nanotrain.model.dropout import DropoutPlace
from nanotrain.model.parallel import ModelParallel
from nanotrain.model.router_stats import StatefulModule
from nanotrain.spec.shape import ModelShape


class MaxLogits(StatefulModule):
    """The largest attention logit of each query head of this rank since the last collection.

    Args:
        num_heads: query heads of this rank.
        recompute: a layer that is recomputed is counted once.

    Attributes:
        largest: [N / tp] fp32, minus infinity before the first microbatch.
        peak: fp32 scalar, the largest of all heads since it was last logged.
    """

    largest: Tensor
    peak: Tensor

    def __init__(self, num_heads: int, recompute: Recompute) -> None:
        super().__init__()
        self.recompute = recompute
        self.register_buffer("largest", torch.full((num_heads,), -torch.inf), persistent=False)
        self.register_buffer("peak", torch.tensor(-torch.inf), persistent=False)

    def observe(self, chunk: AttentionChunk, *, first_head: int = 0) -> None:
        """Count the logits of a chunk; a `LogitObserver`."""
        if self.recompute.is_recomputing:
            return
        heads = self.largest[first_head : first_head + chunk.query.shape[1]]
        logits = largest_logits(chunk)
        torch.maximum(heads, logits, out=heads)
        torch.maximum(self.peak, logits.amax(), out=self.peak)


class LayerScores:
    """The options of the scores of one layer.

    Args:
        model_config: type of the softmax, softcap of the scores, rate of dropout.
        layer: index in the model.
        parallel: tp shards the heads.

    Attributes:
        max_logits: counts the logits in training, not in evaluation; None where they are not tracked.
    """

    def __init__(self, model_config: ModelConfig, *, layer: int, parallel: ModelParallel) -> None:
        self.softcap, self.rate = model_config.attn_logit_softcapping, model_config.attention_dropout
        self.has_zero_sink = model_config.softmax_type is SoftmaxType.off_by_one
        tp, num_heads = parallel.tp.group, ModelShape.of(model_config).num_heads // parallel.tp.group.size
        self.layer, self.num_heads, self.first_head = layer, num_heads, tp.index * num_heads
        self.max_logits = MaxLogits(num_heads, parallel.recompute) if parallel.tracks_logits else None

    def __call__(
        self, context: LayerContext, *, sink: Tensor | None = None, device: torch.device
    ) -> ScoreOptions | None:
        """The options for a microbatch; None for a plain softmax.

        Args:
            context: of the microbatch.
            sink: [heads of this rank], where it is learned.
            device: of the scores.
        """
        if self.has_zero_sink:
            sink = torch.zeros(self.num_heads, device=device)
        dropout = None
        if context.dropout is not None and self.rate > 0:
            words = context.dropout.words_of(self.layer, DropoutPlace.weights)
            dropout = WeightDropout(words, self.rate, self.first_head)
        observe = self.max_logits.observe if self.max_logits is not None and torch.is_grad_enabled() else None
        options = ScoreOptions(sink, self.softcap, dropout, observe)
        return None if options.is_plain and observe is None else options
