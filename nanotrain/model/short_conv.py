"""Gated short convolution (LFM2), in place of attention.

    hidden --+-- gate_in ---.
             +-- value -----*-- conv -----.
             +-- gate_out ----------------*-- output -->

All projections have the width of the residual stream; tp shards their channels.

    B batch   S sequence   H hidden
"""

from functools import partial

from torch import Tensor, nn

from nanotrain.config.model import ModelConfig
from nanotrain.model.context import DropoutPlace, HiddenDropout, LayerContext, ModelParallel
from nanotrain.model.parameters import Parameters
from nanotrain.model.recurrence import ShortConvolution
from nanotrain.parallel.tp.layers import ColumnParallelLinear, RowParallelLinear, column_parallel


class ShortConv(nn.Module):
    """output(gate_out * conv(gate_in * value)); the same interface as `Attention`.

    Args:
        model_config: rate of dropout.
        params: gate_in, gate_out, value, conv, output.
        parallel: tp shards the channels, cp the sequence.
        layer: index in the model.
    """

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
    ) -> None:
        super().__init__()
        column = partial(ColumnParallelLinear, tensor_parallel=parallel.tp)
        self.gate_in = column(*params.linear("gate_in"))
        self.gate_out = column(*params.linear("gate_out"))
        self.value = column(*params.linear("value"))
        self.conv = ShortConvolution(params.submodule("conv"), cp=parallel.cp)
        self.output = RowParallelLinear(*params.linear("output"), tensor_parallel=parallel.tp)
        self.dropout = HiddenDropout(
            model_config.hidden_dropout, layer, DropoutPlace.attention, parallel.tp
        )

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """[B, S or S/tp, H] -> the same shape."""
        layers = (self.gate_in, self.gate_out, self.value)
        gate_in, gate_out, value = column_parallel(hidden, layers)
        out = self.output(self.mix(gate_in, gate_out, value=value, context=context))
        return self.dropout(out, context.dropout)

    def mix(
        self, gate_in: Tensor, gate_out: Tensor, *, value: Tensor, context: LayerContext
    ) -> Tensor:
        """gate_out * conv(gate_in * value), each [B, S, D]."""
        mixed = self.conv(gate_in * value, context)
        return gate_out * mixed
