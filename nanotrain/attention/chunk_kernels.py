"""torch's fused operators of attention to one chunk of keys, which return the log-sum-exp.

    AttentionChunk    queries, one chunk of keys and values, mask
    AttentionResult   out and lse
    FUSED             the operators: of CPUs, of FlashAttention and of cuDNN
    fused_ops         the operators that take a chunk
    flash_trains      whether flash operators have the backward of a head dim on a GPU

On GPUs cuDNN is taken where torch prefers it for whole sequences: compute capability 9.0 and 10.x,
cuDNN newer than 9.15.0. It takes the heads of MLA without padding. Chunks of one query or key stay
with FlashAttention (https://github.com/NVIDIA/cudnn-frontend/issues/1072).

    B batch   N query heads   G key/value heads   Q queries   K keys   D, Dv head dims
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanotrain.comm.device import compute_capability, cudnn_version
from nanotrain.kernels.dropout import keep_factors, mix_in

# limits of the flash operator on GPUs
MAX_FLASH_HEAD_DIM = 256
FLASH_CAPABILITY = (8, 0)
FLASH_GAP = range(193, 225)  # head dims without a backward where shared memory is small
# limits of cuDNN's operator, forward and backward
CUDNN_GENERATIONS = (9, 10)  # major compute capabilities
FIRST_CUDNN = 91501
MAX_CUDNN_HEAD_DIM = 128
MLA_HEAD_DIMS = (192, 128)


@dataclass(frozen=True)
class AttentionChunk:
    """Queries and the keys and values they attend to."""

    query: Tensor  # [B, N, Q, D]
    key: Tensor  # [B, G, K, D]
    value: Tensor  # [B, G, K, Dv]
    # [B or 1, 1 or G, Q, K] bool, True where attention is allowed; rows may be fully masked; None
    # for no mask
    mask: Tensor | None
    is_causal: bool  # query i attends to keys 0..i (Q equals K); only without a mask
    scale: float  # factor of the scores
    softcap: float | None = None  # scores become c * tanh(score / c); None: unchanged
    # dropout of the weights at the positions of the queries and keys; None: nothing is dropped
    dropout: "WeightDropout | None" = None

    def rows(self, rows: slice) -> "AttentionChunk":
        """The chunk of some queries only."""
        dropout = None if self.dropout is None else self.dropout.rows(rows)
        mask = None if self.mask is None else self.mask[:, :, rows]
        return replace(self, query=self.query[:, :, rows], mask=mask, dropout=dropout)


@dataclass(frozen=True)
class AttentionResult:
    """`out` [B, N, Q, Dv] and its log-sum-exp `lse` [B, N, Q], fp32 (fp64 for fp64)."""

    out: Tensor
    lse: Tensor

    def queries(self, queries: slice) -> "AttentionResult":
        """A view of the result of some queries."""
        return AttentionResult(self.out[:, :, queries], self.lse[:, :, queries])


@dataclass(frozen=True)
class ChunkGradients:
    """Gradients of query [B, N, Q, D], key [B, G, K, D] and value [B, G, K, Dv].

    Gradients that are sums over chunks have the dtype of `accumulate_dtype`.
    """

    query: Tensor
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class AttentionOps:
    """Forward and backward, for D == Dv and N == G unless they take other heads."""

    forward: Callable[[AttentionChunk], AttentionResult]
    backward: Callable[..., ChunkGradients]
    takes_groups: bool = False  # whether query heads may share a head of keys and values
    takes_unequal_dims: bool = False  # whether chunks are passed as they are, with groups and Dv


def _mask_as_bias(chunk: AttentionChunk) -> Tensor | None:
    """The mask as a finite bias of the scores."""
    if chunk.mask is None:
        return None
    # torch's operator returns a log-sum-exp of 0 for rows of -inf
    masked = torch.finfo(chunk.query.dtype).min / 2
    bias = torch.zeros_like(chunk.mask, dtype=chunk.query.dtype)
    return bias.masked_fill_(~chunk.mask, masked)


def _forward_cpu(chunk: AttentionChunk) -> AttentionResult:
    """Attention by torch's flash kernel for CPUs: out [B, N, Q, Dv] and lse [B, N, Q]."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        chunk.query,
        chunk.key,
        chunk.value,
        0.0,
        chunk.is_causal,
        attn_mask=_mask_as_bias(chunk),
        scale=chunk.scale,
    )
    return AttentionResult(out, lse)


def _backward_cpu(
    chunk: AttentionChunk, merged: AttentionResult, *, grad: Tensor
) -> ChunkGradients:
    """Gradients by torch's flash kernel for CPUs; shapes as in `AttentionChunk`."""
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad,
        chunk.query,
        chunk.key,
        chunk.value,
        merged.out,
        merged.lse,
        0.0,
        chunk.is_causal,
        attn_mask=_mask_as_bias(chunk),
        scale=chunk.scale,
    )
    return ChunkGradients(*gradients)


def _forward_flash(chunk: AttentionChunk) -> AttentionResult:
    outputs = torch.ops.aten._scaled_dot_product_flash_attention(
        chunk.query, chunk.key, chunk.value, 0.0, chunk.is_causal, scale=chunk.scale
    )
    return AttentionResult(outputs[0], outputs[1])


def _backward_flash(
    chunk: AttentionChunk, merged: AttentionResult, *, grad: Tensor
) -> ChunkGradients:
    """Gradients by torch's flash kernel for GPUs; shapes as in `AttentionChunk`."""
    # The state of the random generator only matters with dropout.
    seed = torch.zeros((2,), dtype=torch.uint64, device=grad.device)
    offset = torch.zeros((), dtype=torch.uint64, device=grad.device)
    out = merged.out.contiguous()
    lse = merged.lse.contiguous()
    num_queries = chunk.query.shape[2]
    num_keys = chunk.key.shape[2]
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad,
        chunk.query,
        chunk.key,
        chunk.value,
        out,
        lse,
        None,  # cumulative lengths
        None,
        num_queries,
        num_keys,
        0.0,
        chunk.is_causal,
        seed,
        offset,
        scale=chunk.scale,
    )
    return ChunkGradients(*gradients)


def _forward_cudnn(chunk: AttentionChunk) -> AttentionResult:
    """Attention by cuDNN: out [B, N, Q, Dv] and lse [B, N, Q]."""
    outputs = torch.ops.aten._scaled_dot_product_cudnn_attention(
        chunk.query,
        chunk.key,
        chunk.value,
        None,  # bias
        True,  # compute the log-sum-exp
        0.0,
        chunk.is_causal,
        scale=chunk.scale,
    )
    return AttentionResult(outputs[0], outputs[1].squeeze(-1))


def _backward_cudnn(
    chunk: AttentionChunk, merged: AttentionResult, *, grad: Tensor
) -> ChunkGradients:
    """Gradients by cuDNN; shapes as in `AttentionChunk`."""
    # The state of the random generator only matters with dropout.
    state = torch.zeros((), dtype=torch.int64, device=grad.device)
    gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad.contiguous(),
        chunk.query,
        chunk.key,
        chunk.value,
        merged.out.contiguous(),
        merged.lse.contiguous()[..., None],
        state,
        state,
        None,  # bias
        None,  # cumulative lengths
        None,
        chunk.query.shape[2],
        chunk.key.shape[2],
        0.0,
        chunk.is_causal,
        scale=chunk.scale,
    )
    return ChunkGradients(*gradients)


FUSED = {
    "cpu": AttentionOps(_forward_cpu, _backward_cpu),
    "flash": AttentionOps(_forward_flash, _backward_flash, takes_groups=True),
    "cudnn": AttentionOps(
        _forward_cudnn, _backward_cudnn, takes_groups=True, takes_unequal_dims=True
    ),
}


def fused_ops(chunk: AttentionChunk) -> AttentionOps | None:
    """The fused operators that take a chunk without score options; None if there are none."""
    if chunk.query.is_cpu:
        return FUSED["cpu"]
    if chunk.mask is not None or chunk.query.itemsize != 2:
        return None
    capability = compute_capability(chunk.query.device) or (0, 0)
    if _cudnn_takes(chunk, capability):
        return FUSED["cudnn"]
    return FUSED["flash"] if _flash_takes(chunk, capability) else None


def _cudnn_takes(chunk: AttentionChunk, capability: tuple[int, int]) -> bool:
    """Whether cuDNN's operator takes a chunk of 16 bits without a mask, and torch prefers it."""
    if capability[0] not in CUDNN_GENERATIONS or cudnn_version() < FIRST_CUDNN:
        return False
    if torch.are_deterministic_algorithms_enabled():
        return False
    num_queries, head_dim = chunk.query.shape[2:]
    num_keys, value_dim = chunk.value.shape[2:]
    if min(num_queries, num_keys) == 1 or head_dim % 8 or value_dim % 8:
        return False
    return max(head_dim, value_dim) <= MAX_CUDNN_HEAD_DIM or (head_dim, value_dim) == MLA_HEAD_DIMS


def _flash_takes(chunk: AttentionChunk, capability: tuple[int, int]) -> bool:
    """Whether the flash operator takes a chunk of 16 bits without a mask."""
    head_dim = max(chunk.query.shape[-1], chunk.value.shape[-1])
    is_supported = head_dim <= MAX_FLASH_HEAD_DIM and capability >= FLASH_CAPABILITY
    return is_supported and flash_trains(head_dim, capability)


def flash_trains(head_dim: int, capability: tuple[int, int] | None) -> bool:
    """Whether flash operators have the backward of a head dim on a GPU.

    GPUs of 100 KB of shared memory per block, of compute capability 8.6 to 8.9 and 12.x, lack some.

    >>> flash_trains(224, (8, 6)), flash_trains(256, (8, 6)), flash_trains(224, (9, 0))
    (False, True, True)
    """
    if capability is None or head_dim not in FLASH_GAP:
        return True
    return not ((8, 6) <= capability <= (8, 9) or capability[0] == 12)


@dataclass(frozen=True)
class WeightDropout:
    """Dropout of the attention weights of one layer and microbatch.

    The dropout of a chunk has the positions of its queries and keys.
    """

    words: Tensor  # [B], one random word per sample
    rate: float
    first_head: int = 0  # index of the first query head of this rank in the model
    queries: Tensor | None = None  # [Q] int64, positions in the sequence
    keys: Tensor | None = None  # [K] int64

    def rows(self, rows: slice) -> "WeightDropout":
        """The dropout of some queries only."""
        assert self.queries is not None, "the dropout of a chunk has positions"
        return replace(self, queries=self.queries[rows])

    def factors(self, num_heads: int, dtype: torch.dtype) -> Tensor:
        """[B, N, Q, K]: 0 where dropped, else 1 / (1 - rate)."""
        assert self.queries is not None and self.keys is not None, (
            "the dropout of a chunk has positions"
        )
        stop = self.first_head + num_heads
        heads = torch.arange(self.first_head, stop, device=self.words.device)
        words = mix_in(self.words[:, None], heads)
        words = mix_in(words[..., None], self.queries)
        words = mix_in(words[..., None], self.keys)
        return keep_factors(words, self.rate, dtype=dtype)
