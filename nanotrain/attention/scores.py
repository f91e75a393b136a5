"""Options of attention scores and weights: softcap, sink and dropout.

    softcap   scores become c * tanh(score / c) (Gemma 2)
    sink      one more score per head, whose weight multiplies no value (gpt-oss; Xiao et al. 2023)
    dropout   of the weights, by the sample, head, query and key (kernels/dropout.py)

ScoreOptions       these options of a layer
WeightDropout      dropout of a microbatch, given by random words; ChunkDropout: of one chunk of queries and keys
add_sink           adds the sink to the result of attention; sink_grad: its gradient

A sink s changes the result (out, lse) over all keys to (out * exp(lse - l), l) with l = log(exp(lse) + exp(s)). The
backward of every chunk reads this result and needs no further change.

    B batch   S sequence   N query heads   G key/value heads   Q queries   K keys   D, Dv head dims
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanotrain.attention.chunk_attention import AttentionChunk, AttentionResult
from nanotrain.kernels.dropout import keep_factors, mix_in


@dataclass(frozen=True)
class ChunkDropout:
    """Dropout of the weights of one chunk."""

    words: Tensor  # [B], one per sample
    rate: float
    first_head: int  # of the chunk, among all heads of the model
    queries: Tensor  # [Q] int64, their positions in the sequence
    keys: Tensor  # [K] int64

    def rows(self, rows: slice) -> "ChunkDropout":
        """The dropout of some queries only."""
        return replace(self, queries=self.queries[rows])

    def factors(self, num_heads: int, dtype: torch.dtype) -> Tensor:
        """[B, N, Q, K]: 0 where dropped, else 1 / (1 - rate)."""
        heads = torch.arange(self.first_head, self.first_head + num_heads, device=self.words.device)
        words = mix_in(self.words[:, None], heads)
        words = mix_in(words[..., None], self.queries)
        return keep_factors(mix_in(words[..., None], self.keys), self.rate, dtype=dtype)


@dataclass(frozen=True)
class WeightDropout:
    """Dropout of the attention weights of one layer and microbatch."""

    words: Tensor  # [B], one per sample
    rate: float
    first_head: int = 0  # of the queries, among all heads of the model

    def at(self, queries: Tensor, keys: Tensor) -> ChunkDropout:
        """The dropout of queries and keys at these positions."""
        return ChunkDropout(self.words, self.rate, self.first_head, queries, keys)


@dataclass(frozen=True)
class ScoreOptions:
    """Options of the scores of one layer and microbatch, besides mask and scale."""

    sink: Tensor | None = None  # [N] of these heads
    softcap: float | None = None
    dropout: WeightDropout | None = None

    def of_heads(self, first: int, number: int) -> "ScoreOptions":
        """The options of heads [first, first + number)."""
        dropout = self.dropout
        if dropout is not None:
            dropout = replace(dropout, first_head=dropout.first_head + first)
        sink = None if self.sink is None else self.sink[first : first + number]
        return ScoreOptions(sink, self.softcap, dropout)

    def of_samples(self, samples: slice) -> "ScoreOptions":
        """The options of some samples of the batch."""
        if self.dropout is None:
            return self
        return replace(self, dropout=replace(self.dropout, words=self.dropout.words[samples]))

    def apply_to(self, chunk: AttentionChunk, *, queries: Tensor, keys: Tensor) -> AttentionChunk:
        """A chunk with the softcap and the dropout, its queries and keys at these positions."""
        dropped = None if self.dropout is None else self.dropout.at(queries, keys)
        return replace(chunk, softcap=self.softcap, dropped=dropped)


def add_sink(total: AttentionResult, sink: Tensor | None) -> AttentionResult:
    """Add the sink of each head to the result over all keys."""
    if sink is None:
        return total
    lse = torch.logaddexp(total.lse, sink.to(total.lse.dtype)[:, None])
    out = total.out * (total.lse - lse).exp_()[..., None].to(total.out.dtype)
    return AttentionResult(out, lse)


def sink_grad(sink: Tensor | None, merged: AttentionResult, *, grad: Tensor) -> Tensor | None:
    """The gradient of the sinks, from the result with them and its gradient [B, N, Q, Dv]."""
    if sink is None:
        return None
    weight = (sink.to(merged.lse.dtype)[:, None] - merged.lse).exp_()
    along = (merged.out.to(weight.dtype) * grad.to(weight.dtype)).sum(-1)
    return -(weight * along).sum((0, 2)).to(sink.dtype)
