"""Attention and Mamba-2 side by side (Falcon-H1): they read one input, and their outputs are added."""

from torch import Tensor, nn

from nanotrain.config.model import ModelConfig
from nanotrain.model.attention import Attention
from nanotrain.model.context import LayerContext, ModelParallel
from nanotrain.model.mamba import Mamba2
from nanotrain.model.parameters import Parameters


class AttentionMamba2(nn.Module):
    """The sum of attention and of Mamba-2 times its factor; the same interface as `Attention`.

    Args:
        model_config: sizes and factors.
        params: those of `Attention` in attention, those of `Mamba2` in mamba.
        parallel: tp shards heads and groups, cp the sequence.
        layer: index in the model. Dropout of both outputs is the same, so that of their sum.
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
