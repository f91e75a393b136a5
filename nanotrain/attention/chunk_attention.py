"""Attention of queries to one chunk of keys, with the log-sum-exp that merges the results of several chunks.

Softmax over all keys follows from softmax over chunks of them:

    lse = log(exp(lse_1) + exp(lse_2))        out = out_1 * exp(lse_1 - lse) + out_2 * exp(lse_2 - lse)

The gradients of a chunk follow from the merged `out` and `lse` alone.

    AttentionChunk        queries, one chunk of keys and values, mask
    AttentionResult       out and lse
    chunk_forward         attention to one chunk
    merge_log_sum_exp     merge two results
    chunk_backward        gradients of one chunk
    FUSED                 torch's fused operators by device; EAGER where there is none

Milakov and Gimelshein, "Online normalizer calculation for softmax"; Dao, "FlashAttention-2", section 3.1.

    B batch   N query heads   G key/value heads   Q queries   K keys   D, Dv head dims
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.comm.device import compute_capability

MAX_FLASH_HEAD_DIM, FLASH_CAPABILITY = 256, (8, 0)  # of the flash operator on GPUs
EAGER_SCORES = 2**26  # scores that are computed at once without a fused operator: 256 MiB in fp32


@dataclass(frozen=True)
class AttentionChunk:
    """Queries and the keys and values they attend to."""

    query: Tensor  # [B, N, Q, D]
    key: Tensor  # [B, G, K, D]
    value: Tensor  # [B, G, K, Dv]
    # [B or 1, 1, Q, K] bool, True where attention is allowed; rows may be fully masked; None for no mask
    mask: Tensor | None
    is_causal: bool  # query i attends to keys 0..i (Q equals K); only without a mask
    scale: float  # of the scores
    softcap: float | None = None  # scores become c * tanh(score / c); None: unchanged
    dropped: "DroppedWeights | None" = None  # dropout of the weights

    def rows(self, rows: slice) -> "AttentionChunk":
        """The chunk of some queries only."""
        dropped = None if self.dropped is None else self.dropped.rows(rows)
        mask = None if self.mask is None else self.mask[:, :, rows]
        return replace(self, query=self.query[:, :, rows], mask=mask, dropped=dropped)


class DroppedWeights(Protocol):
    """Dropout of the weights of a chunk."""

    def rows(self, rows: slice) -> "DroppedWeights":
        """The dropout of some queries only."""
        ...

    def factors(self, num_heads: int, dtype: torch.dtype) -> Tensor:
        """[B, N, Q, K], the factor of each weight."""
        ...


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
    """Gradients of query [B, N, Q, D], key [B, G, K, D] and value [B, G, K, Dv]; accumulate in `accumulate_dtype`."""

    query: Tensor
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class AttentionOps:
    """Forward and backward for N == G and D == Dv."""

    forward: Callable[[AttentionChunk], AttentionResult]
    backward: Callable[..., ChunkGradients]


def accumulate_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which results and gradients of chunks are accumulated: fp32, or fp64 for fp64."""
    return torch.promote_types(tensor.dtype, torch.float32)


def merge_log_sum_exp(total: AttentionResult, part: AttentionResult) -> None:
    """Merge the attention of the same queries to further keys into `total`, in place.

    Args:
        total: in the accumulation dtype; every query must have attended to a key.
        part: fully masked rows contribute nothing.
    """
    lse = torch.logaddexp(total.lse, part.lse)
    total.out.mul_((total.lse - lse).exp_()[..., None])
    total.out.addcmul_(part.out.to(total.out.dtype), (part.lse - lse).exp_()[..., None])
    total.lse.copy_(lse)


def chunk_forward(chunk: AttentionChunk) -> AttentionResult:
    """Attention of a chunk's queries to its keys alone, with `out` in the dtype of the queries.

    Fully masked rows get a very low log-sum-exp and a finite output, so they contribute nothing when merged.
    """
    result = _ops(chunk).forward(_repeat_and_pad(chunk))
    return replace(result, out=result.out[..., : chunk.value.shape[-1]])


def chunk_backward(chunk: AttentionChunk, merged: AttentionResult, *, grad: Tensor) -> ChunkGradients:
    """The contribution of a chunk to the gradients.

    Args:
        chunk: as in the forward.
        merged: the result of the chunk's queries over all chunks of keys.
        grad: [B, N, Q, Dv], the gradient of `merged.out`.
    """
    padded = _repeat_and_pad(chunk)
    out, grad = (_pad(x, padded.value.shape[-1]) for x in (merged.out, grad))
    gradients = _ops(chunk).backward(padded, replace(merged, out=out), grad=grad)
    groups, head_dim, value_head_dim = chunk.key.shape[1], chunk.key.shape[-1], chunk.value.shape[-1]
    return ChunkGradients(
        gradients.query[..., :head_dim],
        _sum_repeats(gradients.key, groups)[..., :head_dim],
        _sum_repeats(gradients.value, groups)[..., :value_head_dim],
    )


def _ops(chunk: AttentionChunk) -> AttentionOps:
    if chunk.softcap is not None or chunk.dropped is not None:
        return EAGER
    if chunk.query.is_cuda and not _has_flash(chunk.query.device, max(chunk.query.shape[-1], chunk.value.shape[-1])):
        return EAGER
    is_half = chunk.query.dtype.itemsize == 2
    return FUSED.get((chunk.query.device.type, chunk.mask is not None, is_half), EAGER)


def _has_flash(device: torch.device, head_dim: int) -> bool:
    """Whether the flash operator runs on a GPU."""
    return head_dim <= MAX_FLASH_HEAD_DIM and (compute_capability(device) or (0, 0)) >= FLASH_CAPABILITY


def _repeat_and_pad(chunk: AttentionChunk) -> AttentionChunk:
    """Repeat key/value heads N / G times and zero-pad head dims to one multiple of 8, as CUDA's operator requires.

    The zeros change neither scores nor outputs.
    """
    repeats = chunk.query.shape[1] // chunk.key.shape[1]
    key, value = (x if repeats == 1 else x.repeat_interleave(repeats, dim=1) for x in (chunk.key, chunk.value))
    head_dim = -(-max(key.shape[-1], value.shape[-1]) // 8) * 8
    query, key, value = (_pad(x, head_dim) for x in (chunk.query, key, value))
    return replace(chunk, query=query, key=key, value=value)


def _pad(x: Tensor, head_dim: int) -> Tensor:
    return x if x.shape[-1] == head_dim else F.pad(x, (0, head_dim - x.shape[-1]))


def _sum_repeats(grad: Tensor, groups: int) -> Tensor:
    return grad if grad.shape[1] == groups else grad.unflatten(1, (groups, -1)).sum(2, dtype=accumulate_dtype(grad))


def _bias(chunk: AttentionChunk) -> Tensor | None:
    """The mask as a bias of the scores, finite: torch's operator returns a log-sum-exp of 0 for rows of -inf."""
    if chunk.mask is None:
        return None
    masked = torch.finfo(chunk.query.dtype).min / 2
    return torch.zeros_like(chunk.mask, dtype=chunk.query.dtype).masked_fill_(~chunk.mask, masked)


def _forward_cpu(chunk: AttentionChunk) -> AttentionResult:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        chunk.query, chunk.key, chunk.value, 0.0, chunk.is_causal, attn_mask=_bias(chunk), scale=chunk.scale
    )
    return AttentionResult(out, lse)


def _backward_cpu(chunk: AttentionChunk, merged: AttentionResult, *, grad: Tensor) -> ChunkGradients:
    inputs = grad, chunk.query, chunk.key, chunk.value, merged.out, merged.lse
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *inputs, 0.0, chunk.is_causal, attn_mask=_bias(chunk), scale=chunk.scale
    )
    return ChunkGradients(*gradients)


def _forward_cuda(chunk: AttentionChunk) -> AttentionResult:
    outputs = torch.ops.aten._scaled_dot_product_flash_attention(
        chunk.query, chunk.key, chunk.value, 0.0, chunk.is_causal, scale=chunk.scale
    )
    return AttentionResult(outputs[0], outputs[1])


def _backward_cuda(chunk: AttentionChunk, merged: AttentionResult, *, grad: Tensor) -> ChunkGradients:
    # The state of the random generator only matters with dropout.
    seed, offset = (torch.zeros(shape, dtype=torch.uint64, device=grad.device) for shape in ((2,), ()))
    inputs = grad, chunk.query, chunk.key, chunk.value, merged.out.contiguous(), merged.lse.contiguous()
    lengths = None, None, chunk.query.shape[2], chunk.key.shape[2]
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *inputs, *lengths, 0.0, chunk.is_causal, seed, offset, scale=chunk.scale
    )
    return ChunkGradients(*gradients)


def _scores(chunk: AttentionChunk) -> tuple[Tensor, Tensor | None]:
    """[B, N, Q, K], very low but finite where masked, and the derivative by scores without softcap; None for 1."""
    dtype = accumulate_dtype(chunk.query)
    scores, slope = (chunk.query.to(dtype) @ chunk.key.to(dtype).mT) * chunk.scale, None
    if chunk.softcap is not None:
        scores = scores.div_(chunk.softcap).tanh_()
        slope = 1 - scores.square()
        scores = scores.mul_(chunk.softcap)
    return scores if chunk.mask is None else scores.masked_fill_(~chunk.mask, torch.finfo(dtype).min / 2), slope


def _row_blocks(chunk: AttentionChunk) -> list[slice]:
    """Queries whose scores are computed at once."""
    batch, heads, queries, _ = chunk.query.shape
    size = max(1, EAGER_SCORES // max(1, batch * heads * chunk.key.shape[2]))
    return [slice(start, min(start + size, queries)) for start in range(0, queries, size)]


def _with_mask(chunk: AttentionChunk) -> AttentionChunk:
    if not chunk.is_causal:
        return chunk
    positions = torch.arange(chunk.key.shape[2], device=chunk.query.device)
    return replace(chunk, mask=(positions[:, None] >= positions)[None, None], is_causal=False)


def _forward_eager(chunk: AttentionChunk) -> AttentionResult:
    chunk = _with_mask(chunk)
    parts = [_forward_rows(chunk.rows(rows)) for rows in _row_blocks(chunk)]
    return AttentionResult(torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2))


def _forward_rows(chunk: AttentionChunk) -> AttentionResult:
    scores, _ = _scores(chunk)
    lse = scores.logsumexp(-1)
    weights = scores.sub_(lse[..., None]).exp_()
    if chunk.dropped is not None:
        weights *= chunk.dropped.factors(weights.shape[1], weights.dtype)
    return AttentionResult((weights @ chunk.value.to(weights.dtype)).to(chunk.query.dtype), lse)


def _backward_eager(chunk: AttentionChunk, merged: AttentionResult, *, grad: Tensor) -> ChunkGradients:
    chunk, queries = _with_mask(chunk), []
    key, value = (torch.zeros(x.shape, dtype=merged.lse.dtype, device=x.device) for x in (chunk.key, chunk.value))
    for rows in _row_blocks(chunk):
        part = _backward_rows(chunk.rows(rows), merged.queries(rows), grad=grad[:, :, rows])
        queries.append(part.query)
        key += part.key
        value += part.value
    return ChunkGradients(torch.cat(queries, 2), key, value)


def _backward_rows(chunk: AttentionChunk, merged: AttentionResult, *, grad: Tensor) -> ChunkGradients:
    scores, slope = _scores(chunk)
    weights = scores.sub_(merged.lse[..., None]).exp_()
    query, key, value, out, grad = (
        x.to(weights.dtype) for x in (chunk.query, chunk.key, chunk.value, merged.out, grad)
    )
    weights_grad, dropped = grad @ value.mT, weights
    if chunk.dropped is not None:
        factors = chunk.dropped.factors(weights.shape[1], weights.dtype)
        weights_grad *= factors
        dropped = weights * factors
    # Derivative of softmax: sum(grad * out) equals the sum over *all* keys of weight times the weight's gradient.
    scores_grad = weights * (weights_grad - (grad * out).sum(-1, keepdim=True)) * chunk.scale
    if slope is not None:
        scores_grad *= slope
    return ChunkGradients(scores_grad @ key, scores_grad.mT @ query, dropped.mT @ grad)


EAGER = AttentionOps(_forward_eager, _backward_eager)
_CPU, _CUDA = AttentionOps(_forward_cpu, _backward_cpu), AttentionOps(_forward_cuda, _backward_cuda)
# By (device type, has a mask, 2-byte dtype): CUDA's operator takes neither masks nor fp32.
FUSED = {
    **{("cpu", has_mask, is_half): _CPU for has_mask in (False, True) for is_half in (False, True)},
    ("cuda", False, True): _CUDA,
}
