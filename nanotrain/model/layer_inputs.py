"""Inputs of its own for each layer (Gemma 3n, Gemma 4).

    tokens -- second embedding --------------------+
    embedded tokens -- projection -- norm ---------+-- inputs of all layers, on the first stage

    hidden -- gate -- activation --+
    input of the layer ------------+-- projection -- norm -- + hidden, at the end of a layer

The inputs are state that layers read (model/shared_state.py): to later stages they are sent along
with the hidden states.

    B batch   S sequence   H hidden   L layers   P channels of an input
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from nanotrain.config.model import ModelConfig
from nanotrain.model.activations import ACTIVATIONS
from nanotrain.model.context import LayerContext, ModelParallel
from nanotrain.model.norm import build_norm
from nanotrain.model.parameters import Parameters
from nanotrain.model.shared_state import State
from nanotrain.parallel.tp.layers import (
    ColumnParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
)
from nanotrain.spec.shape import Source


class LayerInputs(nn.Module):
    """The inputs of all layers.

    Args:
        model_config: sizes; the scale of the embedding is rounded to its dtype.
        params: embedding [Vp/tp, L P], projection [L P, H], norm [P].
        tensor_parallel: shards the vocabulary; under sequence parallelism each rank projects its
            slice of the positions.
    """

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, tensor_parallel: TensorParallel
    ) -> None:
        super().__init__()
        self.size = model_config.layer_input_size
        table = params["embedding.weight"]
        self.embedding = VocabParallelEmbedding(table, tensor_parallel=tensor_parallel)
        self.projection = _replicated(params, "projection", tensor_parallel=tensor_parallel)
        self.norm = build_norm(model_config, params.submodule("norm"))
        scale = torch.tensor(self.size**0.5, dtype=table.dtype, device="cpu")
        self.embedding_scale = scale.item()
        self.projection_scale = model_config.hidden_size**-0.5

    def forward(self, tokens: Tensor, embedded: Tensor) -> Tensor:
        """[B, S] int64 and [B, S or S/tp, H] -> [B, S or S/tp, L, P]."""
        own = self.embedding(tokens) * self.embedding_scale
        projected = self.projection(embedded) * self.projection_scale
        own = own.unflatten(-1, (-1, self.size))
        normalized = self.norm(projected.unflatten(-1, (-1, self.size)))
        inputs: Tensor = (normalized + own) * 0.5**0.5
        return inputs


def layer_input_state(inputs: Tensor) -> State:
    """Split the inputs of all layers [..., L, P] into the input [B, S or S/tp, P] of each layer."""
    state: State = {}
    for layer, layer_input in enumerate(inputs.unbind(2)):
        state[Source("layer_input", layer, is_embedded=True)] = (layer_input,)
    return state


class LayerInputHalf(nn.Module):
    """x + norm(projection(activation(gate(x)) * input of the layer)).

    Args:
        model_config: configuration of the model.
        params: gate [P, H], projection [H, P], norm [H].
        parallel: every tp rank applies it to its hidden states.
        layer: index in the model.
    """

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
    ) -> None:
        super().__init__()
        self.source = Source("layer_input", layer, is_embedded=True)
        self.activation = ACTIVATIONS[model_config.activation]
        self.gate = _replicated(params, "gate", tensor_parallel=parallel.tp)
        self.projection = _replicated(params, "projection", tensor_parallel=parallel.tp)
        self.norm = build_norm(model_config, params.submodule("norm"))

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, S or S/tp, H] -> the same shape."""
        (layer_input,) = context.state[self.source]
        gated = self.activation(self.gate(x)) * layer_input
        out: Tensor = self.norm(self.projection(gated))
        return x + out


def _replicated(
    params: Parameters, name: str, *, tensor_parallel: TensorParallel
) -> ColumnParallelLinear:
    """A linear layer that every tp rank has, with too few channels for fp8."""
    narrow = replace(tensor_parallel.unsharded, fp8=None)
    return ColumnParallelLinear(*params.linear(name), tensor_parallel=narrow)
