"""Core attention with `torch.nn.functional.scaled_dot_product_attention`, for full sequences on one rank.

causal_mask    causal mask, within segments or a window
attend         softmax attention, causal or with a mask
SDPAttention   the core attention of a group of one rank

B batch   S sequence   N query heads   G key/value heads (N is a multiple of G)   D, Dv head dims
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.parallel.cp.chunk_attention import AttentionChunk
from nanotrain.parallel.cp.max_logits import LogitObserver
from nanotrain.parallel.cp.scores import ScoreOptions, attend_by_chunk


def causal_mask(segment_ids: Tensor | None, *, queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Where queries may attend to keys: [B or 1, 1, len(queries), len(keys)] bool.

    Args:
        segment_ids: [B, S] integers of full sequences, equal within a segment; None where attention crosses segments.
        queries: their positions in the sequence.
        keys: their positions in the sequence.
        window: keys before its own that a query attends to; None for all of them.
    """
    allowed = queries[:, None] >= keys  # comparisons of broadcast positions: a difference would take 8 bytes per pair
    if window is not None:
        allowed &= keys >= queries[:, None] - window
    if segment_ids is None:
        return allowed[None, None]
    return allowed & (segment_ids[:, None, queries, None] == segment_ids[:, None, None, keys])


def full_mask(segment_ids: Tensor | None, *, length: int, device: torch.device, window: int | None) -> Tensor:
    """[B or 1, 1, S, S] bool, the causal mask of full sequences of `length` tokens (S)."""
    positions = torch.arange(length, device=device)
    return causal_mask(segment_ids, queries=positions, keys=positions, window=window)


def attend(
    query: Tensor, *, key: Tensor, value: Tensor, mask: Tensor | None, observe: LogitObserver | None = None
) -> Tensor:
    """Softmax attention with grouped queries.

    Args:
        query: [B, S, N, D].
        key: [B, Sk, G, D].
        value: [B, Sk, G, Dv].
        mask: [B or 1, 1, S, Sk] bool, True where a query (row) may attend to a key (column); None for causal.
        observe: called with queries and keys.

    Returns:
        [B, S, N, Dv].
    """
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if observe is not None:
        observe(AttentionChunk(query, key, value, mask, mask is None, scale=query.shape[-1] ** -0.5))
    grouped = query.shape[1] != key.shape[1]
    if grouped and not query.is_cuda:  # on the CPU enable_gqa is 1.4 to 1.5 times slower than repeated heads
        repeats = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        grouped = False
    head_dim, value_head_dim = key.shape[-1], value.shape[-1]
    is_padded = value_head_dim < head_dim and not query.is_cuda
    if is_padded:  # with unequal head dims torch falls back to its math kernel on the CPU, 2 to 4 times slower
        value = F.pad(value, (0, head_dim - value_head_dim))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    return (out[..., :value_head_dim] if is_padded else out).transpose(1, 2)


def chunk_of(query: Tensor, *, key: Tensor, value: Tensor, mask: Tensor | None) -> AttentionChunk:
    """The arguments of `attend` as a chunk."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return AttentionChunk(query, key, value, mask, mask is None, scale=query.shape[-1] ** -0.5)


def attend_with(scores: ScoreOptions, chunk: AttentionChunk, *, first_query: int) -> Tensor:
    """Attention of queries from a position on to the keys from position 0 on: [B, Q, N, Dv]."""
    num_queries, num_keys = chunk.query.shape[2], chunk.key.shape[2]
    positions = torch.arange(max(first_query + num_queries, num_keys), device=chunk.query.device)
    queries = positions[first_query : first_query + num_queries]
    chunk = scores.apply_to(chunk, queries=queries, keys=positions[:num_keys])
    return attend_by_chunk(chunk, scores.sink).transpose(1, 2)


class SDPAttention:
    """`attend` as a core attention."""

    def plan_mask(self, segment_ids: Tensor | None, *, tokens: Tensor, window: int | None = None) -> Tensor | None:
        """[B or 1, 1, S, S] bool with segment ids or a window, else None for causal."""
        return self.plan_full_mask(segment_ids, length=tokens.shape[1], device=tokens.device, window=window)

    def plan_full_mask(
        self, segment_ids: Tensor | None, *, length: int, device: torch.device, window: int | None
    ) -> Tensor | None:
        """The same for sequences of `length` tokens."""
        if segment_ids is None and window is None:
            return None
        return full_mask(segment_ids, length=length, device=device, window=window)

    def __call__(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        observe: LogitObserver | None = None,
        scores: ScoreOptions | None = None,
    ) -> Tensor:
        """`attend`, or with options of the scores `attend_with`."""
        if scores is None:
            return attend(query, key=key, value=value, mask=mask, observe=observe)
        chunk = chunk_of(query, key=key, value=value, mask=mask)
        if observe is not None:
            observe(chunk)
        return attend_with(scores, chunk, first_query=0)
