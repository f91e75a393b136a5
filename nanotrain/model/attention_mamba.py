"""Attention and Mamba-2 on one input, whose outputs are added (Falcon-H1)."""

from torch import Tensor, nn

from nanotrain.config.model import ModelConfig
from nanotrain.model.attention import Attention
from nanotrain.model.context import LayerContext, ModelParallel
from nanotrain.model.mamba import Mamba2
from nanotrain.model.parameters import Parameters


class AttentionMamba2(nn.Module):
    """attention(x) + factor * mamba(x); the same interface as `Attention`.

    Both outputs have the same dropout mask, so the mask applies to their sum.

    Args:
        model_config: sizes and factors.
        params: attention, the parameters of `Attention`; mamba, the parameters of `Mamba2`.
        parallel: tp shards heads and groups, cp the sequence.
        layer: index in the model.
    """

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
    ) -> None:
        super().__init__()
        self.attention = Attention(
            model_config, params.submodule("attention"), parallel=parallel, layer=layer
        )
        self.mamba = Mamba2(model_config, params.submodule("mamba"), parallel=parallel, layer=layer)
        self.factor = model_config.mamba.output_multiplier

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """[B, S or S/tp, H] -> the same shape."""
        return self.attention(hidden, context) + self.factor * self.mamba(hidden, context)
