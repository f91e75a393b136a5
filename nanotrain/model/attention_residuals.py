"""Block attention residuals: a sublayer reads earlier blocks by attention over the depth.

    AttentionConnection   the streams around one sublayer
    EnterBlocks           the embedding, and blocks that have not begun
    AttendStreams         the streams after the last layer

The layers are divided into n - 1 blocks. With b_0 the embedding and b_i the sum of the outputs of
the sublayers of block i so far, a sublayer with the learned vector w (its pseudo-query) computes

    a_i = exp(w . rms(b_i)) / sum_j exp(w . rms(b_j))      over the streams that have begun
    b_current += sublayer(sum_i a_i b_i)

where rms divides by the root mean square of a vector. What the head reads is one more such sum. The
first sublayer of a block reads the complete blocks before it; the block begins with its output.
Chen et al. 2026, "Attention Residuals", section 4 (Kimi).

Streams that have not begun are zeros, so all layers have one shape. Weights are computed again in
the backward, so a block keeps its streams and no copies of them.

    B batch   S sequence   H hidden   n streams
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.config.model import ModelConfig
from nanotrain.model.context import ModelParallel
from nanotrain.model.hyper_connections import WeighStreams
from nanotrain.model.parameters import Parameters
from nanotrain.precision.dtypes import as_fp32
from nanotrain.spec.shape import ModelShape


class BlockWeights(NamedTuple):
    """The weights of one sublayer."""

    read: Tensor  # [B, S, n] fp32, of the streams in its input
    write: Tensor  # [n, 1], 1 for the stream that its output is added to


class AttentionConnection(nn.Module):
    """The streams around one sublayer.

    Args:
        model_config: number of streams and layers, epsilon of norms.
        params: the pseudo-query.
        parallel: recomputation of the stage.
        number: 2 * layer of a token mixer, 2 * layer + 1 of an MLP.
    """

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, number: int
    ) -> None:
        super().__init__()
        self.num_streams = model_config.residual_streams
        self.norm_epsilon = model_config.norm_epsilon
        self.weight = params["weight"]
        layer, is_mlp = divmod(number, 2)
        block = block_of(model_config, layer)
        mixer, _ = ModelShape.of(model_config).kinds(layer)
        is_first_sublayer = not is_mlp or mixer is None
        is_first_layer = layer == 0 or block_of(model_config, layer - 1) != block
        self.written = 1 + block
        self.num_read = self.written
        if not (is_first_sublayer and is_first_layer):
            self.num_read += 1
        self.compute_again = parallel.recompute.checkpointed(self.weigh)

    def forward(self, streams: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """[B, S, n, H] -> the same shape."""
        weights = BlockWeights(*self.compute_again(streams))
        hidden = (weights.read[..., None] * streams).sum(-2).to(streams.dtype)
        out = sublayer(hidden)
        return torch.addcmul(streams, weights.write, out[..., None, :])

    def weigh(self, streams: Tensor) -> BlockWeights:
        """The weights of a microbatch, from [B, S, n, H]."""
        read = attend_streams(streams, self.weight, num_read=self.num_read, eps=self.norm_epsilon)
        write = streams.new_zeros(self.num_streams, 1)
        write[self.written] = 1
        return BlockWeights(read, write)


def block_of(model_config: ModelConfig, layer: int) -> int:
    """The block of a layer, from 0."""
    num_blocks = model_config.residual_streams - 1
    return layer * num_blocks // model_config.num_layers


def attend_streams(streams: Tensor, query: Tensor, *, num_read: int, eps: float) -> Tensor:
    """The weights [B, S, n] of streams, fp32; 0 for streams after the first `num_read`.

    Args:
        streams: [B, S, n, H].
        query: [H].
        num_read: streams that have begun.
        eps: added to the mean square.
    """
    read = as_fp32(streams[..., :num_read, :])
    scores = (read * as_fp32(query)).sum(-1)
    scores = scores * torch.rsqrt(read.square().mean(-1) + eps)
    return F.pad(torch.softmax(scores, dim=-1), (0, streams.shape[-2] - num_read))


class EnterBlocks(nn.Module):
    """The embedding in the first stream, and zeros in the others."""

    def __init__(self, model_config: ModelConfig) -> None:
        super().__init__()
        self.num_streams = model_config.residual_streams

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, n H]."""
        return F.pad(x, (0, (self.num_streams - 1) * x.shape[-1]))


class AttendStreams(WeighStreams):
    """The sum after the last layer, with one more pseudo-query."""

    def weigh(self, streams: Tensor) -> Tensor:
        """The weights [B, S, n] of the streams [B, S, n, H]."""
        return attend_streams(
            streams, self.weight, num_read=self.num_streams, eps=self.norm_epsilon
        )
