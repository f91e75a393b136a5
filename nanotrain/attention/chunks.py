"""Attention of queries to one chunk of keys, with the log-sum-exp that merges several chunks.

Softmax over all keys follows from softmax over chunks of them, and the gradients of a chunk from
the merged result:

    lse = log(exp(lse_1) + exp(lse_2))
    out = out_1 * exp(lse_1 - lse) + out_2 * exp(lse_2 - lse)

    chunk_forward         attention to one chunk; chunk_backward: its gradients
    merge_log_sum_exp     merge two results
    EAGER                 the form without torch's fused operators (chunk_kernels.py)
    ScoreOptions          options of the scores of a layer:

    softcap   scores become c * tanh(score / c) (Gemma 2)
    sink      one more score per head, whose weight multiplies no value (gpt-oss; Xiao et al. 2023)
    dropout   of the weights, by the sample, head, query and key (kernels/dropout.py)

A sink s changes the result (out, lse) over all keys to (out * exp(lse - l), l) with l =
log(exp(lse) + exp(s)). The backward of every chunk reads this result and needs no further change.

Milakov and Gimelshein, "Online normalizer calculation for softmax"; Dao, "FlashAttention-2",
section 3.1.

    B batch   N query heads   G key/value heads   Q queries   K keys   D, Dv head dims
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.attention.chunk_kernels import (
    AttentionChunk,
    AttentionOps,
    AttentionResult,
    ChunkGradients,
    WeightDropout,
    fused_ops,
)

EAGER_SCORES = 2**26  # scores that are computed at once without a fused operator: 256 MiB in fp32


def accumulate_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of sums of results and gradients: fp32, or fp64 for fp64."""
    return torch.promote_types(tensor.dtype, torch.float32)


def merge_log_sum_exp(total: AttentionResult, part: AttentionResult) -> None:
    """Merge the attention of the same queries to further keys into `total`, in place.

    Args:
        total: result in the accumulation dtype; every query must have attended to a key.
        part: fully masked rows contribute nothing.
    """
    lse = torch.logaddexp(total.lse, part.lse)
    total_weight = (total.lse - lse).exp_()
    part_weight = (part.lse - lse).exp_()
    total.out.mul_(total_weight[..., None])
    total.out.addcmul_(part.out.to(total.out.dtype), part_weight[..., None])
    total.lse.copy_(lse)


def chunk_forward(chunk: AttentionChunk) -> AttentionResult:
    """Attention of a chunk's queries to its keys alone, with `out` in the dtype of the queries.

    Fully masked rows get a very low log-sum-exp and a finite output, so they contribute nothing
    when merged.
    """
    result = _ops(chunk).forward(_repeat_and_pad(chunk))
    return replace(result, out=result.out[..., : chunk.value.shape[-1]])


def chunk_backward(
    chunk: AttentionChunk, merged: AttentionResult, *, grad: Tensor
) -> ChunkGradients:
    """The contribution of a chunk to the gradients.

    Args:
        chunk: chunk of the forward.
        merged: the result of the chunk's queries over all chunks of keys.
        grad: [B, N, Q, Dv], the gradient of `merged.out`.
    """
    padded = _repeat_and_pad(chunk)
    padded_dim = padded.value.shape[-1]
    grad = _pad(grad, padded_dim)
    merged = replace(merged, out=_pad(merged.out, padded_dim))
    gradients = _ops(chunk).backward(padded, merged, grad=grad)
    num_groups = chunk.key.shape[1]
    head_dim = chunk.key.shape[-1]
    value_dim = chunk.value.shape[-1]
    query_grad = gradients.query[..., :head_dim]
    key_grad = _sum_repeats(gradients.key, num_groups)[..., :head_dim]
    value_grad = _sum_repeats(gradients.value, num_groups)[..., :value_dim]
    return ChunkGradients(query_grad, key_grad, value_grad)


def _ops(chunk: AttentionChunk) -> AttentionOps:
    """torch's fused operator where it can compute the chunk, else EAGER."""
    has_options = chunk.softcap is not None or chunk.dropout is not None
    if has_options:
        return EAGER
    return fused_ops(chunk) or EAGER


def _repeat_and_pad(chunk: AttentionChunk) -> AttentionChunk:
    """Repeat key/value heads where the operator needs it, and pad all head dims to one size.

    The size is a multiple of 8, as the flash operator of GPUs needs it. The zeros change neither
    scores nor outputs.
    """
    ops = _ops(chunk)
    if ops.takes_unequal_dims:
        return chunk
    key = chunk.key
    value = chunk.value
    mask = chunk.mask
    repeats = chunk.query.shape[1] // key.shape[1]
    if repeats > 1 and not ops.takes_groups:
        key = key.repeat_interleave(repeats, dim=1)
        value = value.repeat_interleave(repeats, dim=1)
        if mask is not None and mask.shape[1] > 1:
            mask = mask.repeat_interleave(repeats, dim=1)
    largest = max(key.shape[-1], value.shape[-1])
    head_dim = math.ceil(largest / 8) * 8
    return replace(
        chunk,
        query=_pad(chunk.query, head_dim),
        key=_pad(key, head_dim),
        value=_pad(value, head_dim),
        mask=mask,
    )


def _pad(x: Tensor, head_dim: int) -> Tensor:
    if x.shape[-1] == head_dim:
        return x
    return F.pad(x, (0, head_dim - x.shape[-1]))


def _sum_repeats(grad: Tensor, groups: int) -> Tensor:
    """Sum the gradients of repeated heads."""
    if grad.shape[1] == groups:
        return grad
    return grad.unflatten(1, (groups, -1)).sum(2, dtype=accumulate_dtype(grad))


def _scores(chunk: AttentionChunk) -> tuple[Tensor, Tensor | None]:
    """Scores [B, N, Q, K], very low but finite where masked, and the slope of the softcap.

    The slope is the derivative by the scores before the softcap; None without one.
    """
    dtype = accumulate_dtype(chunk.query)
    products = chunk.query.to(dtype) @ chunk.key.to(dtype).mT
    scores = products * chunk.scale
    slope: Tensor | None = None
    if chunk.softcap is not None:
        scores = scores.div_(chunk.softcap).tanh_()
        slope = 1 - scores.square()
        scores = scores.mul_(chunk.softcap)
    if chunk.mask is not None:
        scores = scores.masked_fill_(~chunk.mask, torch.finfo(dtype).min / 2)
    return scores, slope


def _row_blocks(chunk: AttentionChunk) -> list[slice]:
    """Queries whose scores are computed at once."""
    batch, heads, queries, _ = chunk.query.shape
    scores_per_query = batch * heads * chunk.key.shape[2]
    size = max(1, EAGER_SCORES // max(1, scores_per_query))
    return [slice(start, min(start + size, queries)) for start in range(0, queries, size)]


def _with_mask(chunk: AttentionChunk) -> AttentionChunk:
    """A causal chunk with its mask."""
    if not chunk.is_causal:
        return chunk
    positions = torch.arange(chunk.key.shape[2], device=chunk.query.device)
    mask = positions[:, None] >= positions
    return replace(chunk, mask=mask[None, None], is_causal=False)


def _forward_eager(chunk: AttentionChunk) -> AttentionResult:
    """Attention by matrix products, block by block of queries to bound the scores."""
    chunk = _with_mask(chunk)
    parts = [_forward_rows(chunk.rows(rows)) for rows in _row_blocks(chunk)]
    out = torch.cat([part.out for part in parts], dim=2)
    lse = torch.cat([part.lse for part in parts], dim=2)
    return AttentionResult(out, lse)


def _forward_rows(chunk: AttentionChunk) -> AttentionResult:
    """Attention of one block of queries: out [B, N, q, Dv] and lse [B, N, q]."""
    scores, _ = _scores(chunk)
    lse = scores.logsumexp(-1)
    weights = scores.sub_(lse[..., None]).exp_()
    if chunk.dropout is not None:
        weights *= chunk.dropout.factors(weights.shape[1], weights.dtype)
    out = weights @ chunk.value.to(weights.dtype)
    return AttentionResult(out.to(chunk.query.dtype), lse)


def _backward_eager(
    chunk: AttentionChunk, merged: AttentionResult, *, grad: Tensor
) -> ChunkGradients:
    """Gradients by matrix products, block by block of queries to bound the scores."""
    chunk = _with_mask(chunk)
    key = merged.lse.new_zeros(chunk.key.shape)
    value = merged.lse.new_zeros(chunk.value.shape)
    queries = []
    for rows in _row_blocks(chunk):
        part = _backward_rows(chunk.rows(rows), merged.queries(rows), grad=grad[:, :, rows])
        queries.append(part.query)
        key += part.key
        value += part.value
    return ChunkGradients(torch.cat(queries, 2), key, value)


def _backward_rows(
    chunk: AttentionChunk, merged: AttentionResult, *, grad: Tensor
) -> ChunkGradients:
    """Gradients of one block of queries; `key` and `value` are its addends to the sums.

    The weights [B, N, q, K] are computed again from the scores and the log-sum-exp.
    """
    scores, slope = _scores(chunk)
    weights = scores.sub_(merged.lse[..., None]).exp_()
    dtype = weights.dtype
    grad = grad.to(dtype)
    weights_grad = grad @ chunk.value.to(dtype).mT
    dropped = weights
    if chunk.dropout is not None:
        factors = chunk.dropout.factors(weights.shape[1], dtype)
        weights_grad *= factors
        dropped = weights * factors
    # Derivative of softmax: sum(grad * out) equals the sum over *all* keys of weight times the
    # weight's gradient.
    sums = (grad * merged.out.to(dtype)).sum(-1, keepdim=True)
    scores_grad = weights * (weights_grad - sums) * chunk.scale
    if slope is not None:
        scores_grad *= slope
    query_grad = scores_grad @ chunk.key.to(dtype)
    key_grad = scores_grad.mT @ chunk.query.to(dtype)
    value_grad = dropped.mT @ grad
    return ChunkGradients(query_grad, key_grad, value_grad)


EAGER = AttentionOps(_forward_eager, _backward_eager)


@dataclass(frozen=True)
class ScoreOptions:
    """Options of the scores of one layer and microbatch, besides mask and scale."""

    sink: Tensor | None = None  # [N] of these heads
    softcap: float | None = None
    dropout: WeightDropout | None = None
    # for QK-clip, called with all queries and keys that attend to each other, one chunk at a time;
    # its option `first_head` is the local index of the chunk's first query head
    observe: Callable[..., None] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether no option changes the scores."""
        return self.sink is None and self.softcap is None and self.dropout is None

    def for_heads(self, first: int, number: int) -> "ScoreOptions":
        """The options of heads [first, first + number)."""
        dropout = self.dropout
        if dropout is not None:
            dropout = replace(dropout, first_head=dropout.first_head + first)
        sink = None if self.sink is None else self.sink[first : first + number]
        observe = None if self.observe is None else partial(self.observe, first_head=first)
        return ScoreOptions(sink, self.softcap, dropout, observe)

    def apply_to(
        self, chunk: AttentionChunk, *, samples: slice, queries: Tensor, keys: Tensor
    ) -> AttentionChunk:
        """A chunk with the softcap and the dropout.

        Args:
            chunk: chunk of some samples.
            samples: its samples.
            queries: [Q] int64, positions of its queries.
            keys: [K] int64, positions of its keys.
        """
        dropout = self.dropout
        if dropout is not None:
            dropout = replace(dropout, words=dropout.words[samples], queries=queries, keys=keys)
        return replace(chunk, softcap=self.softcap, dropout=dropout)


def add_sink(total: AttentionResult, sink: Tensor | None) -> AttentionResult:
    """Add the sink of each head to the result over all keys."""
    if sink is None:
        return total
    lse = torch.logaddexp(total.lse, sink.to(total.lse.dtype)[:, None])
    weight = (total.lse - lse).exp_()
    out = total.out * weight[..., None].to(total.out.dtype)
    return AttentionResult(out, lse)


def sink_grad(sink: Tensor | None, merged: AttentionResult, *, grad: Tensor) -> Tensor | None:
    """The gradient of the sinks, from the result with sinks and its gradient [B, N, Q, Dv]."""
    if sink is None:
        return None
    dtype = merged.lse.dtype
    weight = (sink.to(dtype)[:, None] - merged.lse).exp_()
    products = merged.out.to(dtype) * grad.to(dtype)
    summed = (weight * products.sum(-1)).sum((0, 2))
    return -summed.to(sink.dtype)
