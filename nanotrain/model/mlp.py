"""`MLP`, and `build_mlp`: the MLP or the mixture of experts (moe.py) of a layer.

B batch   S sequence   H hidden   F inner width of the MLP
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from nanotrain.config.model import ModelConfig
from nanotrain.model.activations import build_activation
from nanotrain.model.context import DropoutPlace, HiddenDropout, LayerContext, ModelParallel
from nanotrain.model.down_projection import fused_projection
from nanotrain.model.moe import MoELayer
from nanotrain.model.parameters import Parameters
from nanotrain.parallel.tp.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    column_parallel,
)


class MLP(nn.Module):
    """down(activation(up(x))), or with a gate down(activation(gate(x)) * up(x)).

    Shazeer 2020, "GLU Variants Improve Transformer", for the gate.

    Args:
        model_config: the activation between the projections.
        params: up, down; gate where declared.
        tensor_parallel: shards the inner width F.
        dropout: dropout of the output; None in a shared expert (the layer drops the sum).
    """

    def __init__(
        self,
        model_config: ModelConfig,
        params: Parameters,
        *,
        tensor_parallel: TensorParallel,
        dropout: HiddenDropout | None = None,
    ) -> None:
        super().__init__()
        column = partial(ColumnParallelLinear, tensor_parallel=tensor_parallel)
        self.gate: ColumnParallelLinear | None = None
        if "gate.weight" in params:
            self.gate = column(*params.linear("gate"))
        self.activation = build_activation(model_config, params)
        self.up = column(*params.linear("up"))
        self.down = RowParallelLinear(*params.linear("down"), tensor_parallel=tensor_parallel)
        fused = fused_projection(model_config, params, tensor_parallel=tensor_parallel)
        self.project = fused or activate_then_project
        self.dropout = dropout

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """[B, S or S/tp, H] -> the same shape."""
        layers = (self.up,) if self.gate is None else (self.gate, self.up)
        projected = column_parallel(hidden, layers)
        out = self.project(self.down, self.activation, *projected)
        if self.dropout is None:
            return out
        return self.dropout(out, context.dropout)


def activate_then_project(
    down: RowParallelLinear, activation: Callable[..., Tensor], *projected: Tensor
) -> Tensor:
    """down(activation(gate, up)), or down(activation(up)), in the dtype of the parameters."""
    out: Tensor = down(activation(*projected))
    return out


def build_mlp(
    model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int = 0
) -> nn.Module:
    """A mixture of experts where a router is declared, else a dense MLP."""
    dropout = HiddenDropout(model_config.hidden_dropout, layer, DropoutPlace.mlp, parallel.tp)
    if "router.weight" not in params:
        return MLP(model_config, params, tensor_parallel=parallel.tp, dropout=dropout)
    shared: MLP | None = None
    if declared := params.submodule("shared"):
        shared = MLP(model_config, declared, tensor_parallel=parallel.tp)
    return MoELayer(model_config, params, parallel=parallel, shared=shared, dropout=dropout)
