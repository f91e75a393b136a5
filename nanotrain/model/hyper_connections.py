"""Several residual streams: blocks that read, write and mix them with learned weights.

    HyperBlock              a block of n streams
    HyperConnection         hyper-connections (Zhu et al. 2024)
    ManifoldConnection      with a doubly stochastic mixing matrix: mHC (Xie et al. 2025)
    EnterStreams            the embedding in every stream
    SumStreams              the streams after the last layer: their sum
    WeighManifoldStreams    the same, weighted

    streams ---+--- read --> hidden --> sublayer --> out --- write ---+
     [n, H]    |                                                      + --> streams
               +------------------------ mix -------------------------+

Weights are computed again in the backward, so a block keeps its streams and no copies of them.

    B batch   S sequence   H hidden   n streams
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.config.model import ModelConfig
from nanotrain.model.context import LayerContext, ModelParallel
from nanotrain.model.norm import build_norm
from nanotrain.model.parameters import Parameters
from nanotrain.model.sublayers import Sublayers
from nanotrain.precision.dtypes import as_fp32


class StreamWeights(NamedTuple):
    """The weights of one sublayer, fp32."""

    read: Tensor  # [B, S, n], of the streams in the input of the sublayer
    write: Tensor  # [B, S, n], of its output in the streams
    mix: Tensor  # [B, S, n, n], from a stream (first) to a stream (second)


class _Connection(nn.Module, ABC):
    """The streams around one sublayer.

    Args:
        model_config: number of streams, epsilon of norms.
        params: weight, bias and scale.
        parallel: recomputation of the stage.
    """

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel
    ) -> None:
        super().__init__()
        self.num_streams = model_config.residual_streams
        self.weight = params["weight"]
        self.bias = params["bias"]
        self.scale = params["scale"]
        self.compute_again = parallel.recompute.checkpointed(self.weigh)

    def forward(self, streams: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """[B, S, n, H] -> the same shape."""
        weights = StreamWeights(*self.compute_again(streams))
        hidden = (weights.read[..., None] * streams).sum(-2).to(streams.dtype)
        out = sublayer(hidden)
        write = weights.write.to(out.dtype)
        mix = weights.mix.to(out.dtype)
        return write[..., None] * out[..., None, :] + mix.transpose(-1, -2) @ streams

    @abstractmethod
    def weigh(self, streams: Tensor) -> StreamWeights:
        """The weights of a microbatch, from [B, S, n, H]."""


class HyperConnection(_Connection):
    """Dynamic hyper-connections (Zhu et al. 2024, equations 10 to 13).

    The static weights are `bias` plus those of a plain residual: a sublayer reads one stream, in
    turn, and is added to all of them, which are not mixed.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        params: Parameters,
        *,
        parallel: ModelParallel,
        number: int,
    ) -> None:
        super().__init__(model_config, params, parallel=parallel)
        self.norm = build_norm(model_config, params.submodule("norm"))
        self.first_read = number % self.num_streams

    def weigh(self, streams: Tensor) -> StreamWeights:
        """The weights of a microbatch, from [B, S, n, H]."""
        n = self.num_streams
        projected = F.linear(as_fp32(self.norm(streams)), as_fp32(self.weight)).tanh()
        scale = as_fp32(self.scale)
        static = as_fp32(self.bias).view(n, n + 2)
        unmixed = torch.eye(n, dtype=static.dtype, device=static.device)
        read = projected[..., 0] * scale[0] + static[:, 0] + unmixed[self.first_read]
        write = projected[..., 1] * scale[1] + static[:, 1] + 1
        mix = projected[..., 2:] * scale[0] + static[:, 2:] + unmixed
        return StreamWeights(read, write, mix)


class ManifoldConnection(_Connection):
    """Hyper-connections whose mixing matrix is doubly stochastic (DeepSeek-V4, section 2.2).

    Rows and columns are divided by their sums in turn (Sinkhorn and Knopp 1967), so streams keep
    their mean, and mixing never makes them larger.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        params: Parameters,
        *,
        parallel: ModelParallel,
        number: int,
    ) -> None:
        super().__init__(model_config, params, parallel=parallel)
        self.norm_epsilon = model_config.norm_epsilon
        self.epsilon = model_config.mhc_epsilon
        self.num_iterations = model_config.mhc_sinkhorn_iterations

    def weigh(self, streams: Tensor) -> StreamWeights:
        """The weights of a microbatch, from [B, S, n, H]."""
        n = self.num_streams
        projected = project_streams(streams, self.weight, eps=self.norm_epsilon)
        sizes = (n, n, n * n)
        read, write, mix = projected.split(sizes, dim=-1)
        read_bias, write_bias, mix_bias = as_fp32(self.bias).split(sizes)
        scale = as_fp32(self.scale)
        read = torch.sigmoid(read * scale[0] + read_bias) + self.epsilon
        write = 2 * torch.sigmoid(write * scale[1] + write_bias)
        logits = (mix * scale[2] + mix_bias).unflatten(-1, (n, n))
        return StreamWeights(read, write, self._doubly_stochastic(logits))

    def _doubly_stochastic(self, logits: Tensor) -> Tensor:
        """[..., n, n] -> positive matrices whose rows and columns sum to 1."""
        matrix = torch.softmax(logits, dim=-1) + self.epsilon
        matrix = matrix / (matrix.sum(-2, keepdim=True) + self.epsilon)
        for _ in range(self.num_iterations - 1):
            matrix = matrix / (matrix.sum(-1, keepdim=True) + self.epsilon)
            matrix = matrix / (matrix.sum(-2, keepdim=True) + self.epsilon)
        return matrix


def project_streams(streams: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """RMSNorm without weights of all streams together, and a projection in fp32.

    Args:
        streams: [B, S, n, H].
        weight: [outputs, n H].
        eps: added to the mean square.
    """
    flat = as_fp32(streams.flatten(-2))
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    return F.linear(flat, as_fp32(weight))


class HyperBlock(Sublayers):
    """A block, or a half of one, whose residual stream is n streams.

    Args:
        connection: what reads and writes the streams around a sublayer: (model_config, params, *,
            parallel, number), forward(streams, sublayer).
    """

    def __init__(
        self,
        model_config: ModelConfig,
        params: Parameters,
        *,
        parallel: ModelParallel,
        layer: int,
        connection: Callable[..., nn.Module],
    ) -> None:
        super().__init__(model_config, params, parallel=parallel, layer=layer)
        self.num_streams = model_config.residual_streams
        build = partial(connection, model_config, parallel=parallel)
        if declared := params.submodule("attention_connection"):
            self.attention_connection = build(declared, number=2 * layer)
        if declared := params.submodule("mlp_connection"):
            self.mlp_connection = build(declared, number=2 * layer + 1)

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, S or S/tp, n H] -> the same shape."""
        streams = x.unflatten(-1, (self.num_streams, -1))
        if hasattr(self, "attention"):
            streams = self.attention_connection(
                streams, partial(self.attention_output, context=context)
            )
        if hasattr(self, "mlp"):
            sublayer = partial(self.mlp_output, context=context)
            streams = self.mlp_connection(streams, sublayer)
        return streams.flatten(-2)


class EnterStreams(nn.Module):
    """The embedding in every stream."""

    def __init__(self, model_config: ModelConfig) -> None:
        super().__init__()
        self.num_streams = model_config.residual_streams

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, n H]."""
        return x.repeat(1, 1, self.num_streams)


class SumStreams(nn.Module):
    """The sum of the streams after the last layer."""

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel
    ) -> None:
        super().__init__()
        self.num_streams = model_config.residual_streams

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, n H] -> [B, S, H]."""
        return x.unflatten(-1, (self.num_streams, -1)).sum(-2)


class WeighStreams(nn.Module, ABC):
    """A weighted sum of the streams after the last layer.

    Args:
        model_config: number of streams, epsilon.
        params: parameters of the weights.
        parallel: recomputation of the stage.
    """

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel
    ) -> None:
        super().__init__()
        self.num_streams = model_config.residual_streams
        self.norm_epsilon = model_config.norm_epsilon
        self.weight = params["weight"]
        self.compute_again = parallel.recompute.checkpointed(self.weigh)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, n H] -> [B, S, H]."""
        streams = x.unflatten(-1, (self.num_streams, -1))
        weights: Tensor = self.compute_again(streams)
        return (weights[..., None] * streams).sum(-2).to(x.dtype)

    @abstractmethod
    def weigh(self, streams: Tensor) -> Tensor:
        """The weights [B, S, n] of the streams [B, S, n, H]."""


class WeighManifoldStreams(WeighStreams):
    """The sum with a sigmoid of projected streams as weights (DeepSeek-V4).

    Args:
        model_config: number of streams, epsilon.
        params: weight, bias and scale.
        parallel: recomputation of the stage.
    """

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel
    ) -> None:
        super().__init__(model_config, params, parallel=parallel)
        self.epsilon = model_config.mhc_epsilon
        self.bias = params["bias"]
        self.scale = params["scale"]

    def weigh(self, streams: Tensor) -> Tensor:
        """The weights [B, S, n] of the streams [B, S, n, H]."""
        projected = project_streams(streams, self.weight, eps=self.norm_epsilon)
        logits = projected * as_fp32(self.scale) + as_fp32(self.bias)
        return torch.sigmoid(logits) + self.epsilon
