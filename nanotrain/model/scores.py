"""`LayerScores`: softcap, sink and dropout of the scores of an attention layer, per microbatch."""

import torch
from torch import Tensor

from nanotrain.attention.chunks import ScoreOptions, WeightDropout
from nanotrain.config.config import ModelConfig, SoftmaxType
from nanotrain.model.context import LayerContext
from nanotrain.model.dropout import DropoutPlace
from nanotrain.parallel.tp.tensor_parallel import TensorParallel
from nanotrain.spec.shape import ModelShape


class LayerScores:
    """The options of the scores of one layer.

    Args:
        model_config: type of the softmax, softcap of the scores, rate of dropout.
        layer: index in the model.
        heads: query heads of this rank, among those of the model.
    """

    def __init__(self, model_config: ModelConfig, *, layer: int, heads: range) -> None:
        self.softcap, self.rate = model_config.attn_logit_softcapping, model_config.attention_dropout
        self.has_zero_sink = model_config.softmax_type is SoftmaxType.off_by_one
        self.layer, self.heads = layer, heads

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
            sink = torch.zeros(len(self.heads), device=device)
        dropout = None
        if context.dropout is not None and self.rate > 0:
            words = context.dropout.words_of(self.layer, DropoutPlace.weights)
            dropout = WeightDropout(words, self.rate, self.heads.start)
        if sink is None and self.softcap is None and dropout is None:
            return None
        return ScoreOptions(sink, self.softcap, dropout)


def local_heads(shape: ModelShape, tensor_parallel: TensorParallel) -> range:
    """The query heads of this tp rank."""
    number, group = shape.num_heads // tensor_parallel.group.size, tensor_parallel.group
    return range(group.index * number, (group.index + 1) * number)
