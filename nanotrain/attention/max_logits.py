"""The largest attention logit of each head, for QK-clip.

LogitObserver    what a core attention calls with the queries and keys that attend to each other
largest_logits   the largest logits of one chunk

Attention kernels return no logits, so the scores are computed once more, a block of queries at a time: one of the two
matrix products of a forward, without gradients.

    B batch   N query heads   G key/value heads   Q queries   K keys   D head dim
"""

from typing import Protocol

import torch
from torch import Tensor

from nanotrain.attention.chunk_attention import AttentionChunk

BLOCK_NUMEL = 2**24  # scores at once: 64 MiB in fp32


class LogitObserver(Protocol):
    """Called by a core attention with queries and keys."""

    def __call__(self, chunk: AttentionChunk, *, first_head: int = 0) -> None:
        """Observe queries and keys; `first_head` is the index on this rank of the first of the chunk's query heads."""
        ...


@torch.no_grad()
def largest_logits(chunk: AttentionChunk, *, block_numel: int = BLOCK_NUMEL) -> Tensor:
    """The largest scaled and unmasked score of each head: [N] fp32, minus infinity for a head without any.

    The products have the dtype of the queries: in bf16 a logit is exact to 2^-9.
    """
    batch, num_heads, num_queries, _ = chunk.query.shape
    num_groups, num_keys = chunk.key.shape[1:3]
    grouped = chunk.query.unflatten(1, (num_groups, -1))  # [B, G, N / G, Q, D]
    largest = grouped.new_full((num_heads,), -torch.inf, dtype=torch.float32)
    length = max(1, block_numel // (batch * num_heads * num_keys))
    for start in range(0, num_queries, length):
        stop = min(start + length, num_queries)
        keys = chunk.key[:, :, :stop] if chunk.is_causal else chunk.key
        scores = (grouped[:, :, :, start:stop].flatten(2, 3) @ keys.mT).unflatten(2, (-1, stop - start))
        mask = _mask(chunk, start=start, stop=stop)
        if mask is not None:
            scores.masked_fill_(~mask, -torch.inf)
        torch.maximum(largest, scores.amax((0, 3, 4)).flatten().float() * chunk.scale, out=largest)
    return largest


def _mask(chunk: AttentionChunk, *, start: int, stop: int) -> Tensor | None:
    """A mask that broadcasts to [B, G, N / G, stop - start, K], True where queries [start, stop) may attend."""
    if chunk.is_causal:
        positions = torch.arange(stop, device=chunk.query.device)
        return positions[start:, None] >= positions
    return None if chunk.mask is None else chunk.mask[:, :, None, start:stop]
