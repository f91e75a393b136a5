"""Attention of each query to keys that are gathered for it.

    SelectedKeys    positions of the keys of some queries
    Rows            queries with their gathered keys: forward and backward
    take_rows       rows of sequences by their positions; add_rows: their gradients

The heads of a query that share keys are the rows of one matrix product with them. Keys are gathered
for some queries at a time (`GATHERED_NUMEL`), and again in the backward.

    B batch   Q queries   S keys   K keys of a query   N heads   D, Dv head dims   R = B * Q
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.attention.chunk_kernels import AttentionChunk
from nanotrain.attention.chunks import ScoreOptions, accumulate_dtype
from nanotrain.spec.kinds.dsa import GATHERED_NUMEL


@dataclass(frozen=True)
class AttentionResults:
    """Outputs of the attention of R queries, and their weights."""

    out: Tensor  # [R, N, Dv]
    lse: Tensor  # [R, N], log-sum-exp of the scores
    weights: Tensor  # [R, N, K], before dropout


@dataclass(frozen=True)
class RowGradients:
    """Gradients of R queries and their keys, and the output, which is computed again."""

    query: Tensor  # [R, N, D]
    keys: Tensor  # [R, K, D] in the accumulation dtype, with the gradients of values
    out: Tensor  # [R, N, Dv]


@dataclass(frozen=True)
class Rows:
    """Queries and the keys of each of them, whose first channels are its values."""

    query: Tensor  # [R, N, D]
    keys: Tensor  # [R, K, D]
    mask: Tensor  # [R, 1, K] bool, False after the last key of a query
    value_dim: int
    scale: float
    softcap: float | None = None
    dropout: Tensor | None = None  # [R, N, K], factors of the weights

    @property
    def values(self) -> Tensor:
        """[R, K, Dv]."""
        return self.keys[..., : self.value_dim]

    def forward(self) -> AttentionResults:
        """Softmax attention."""
        scores, _ = self._scores()
        lse = scores.logsumexp(-1)
        weights = scores.sub_(lse[..., None]).exp_()
        dropped = self._drop(weights).to(self.keys.dtype)
        return AttentionResults(dropped @ self.values, lse, weights)

    def backward(self, *, lse: Tensor, sums: Tensor, grad: Tensor) -> RowGradients:
        """The gradients.

        Args:
            lse: [R, N], log-sum-exp of the scores.
            sums: [R, N], the sum over all channels of the output times its gradient.
            grad: [R, N, Dv], the gradient of the output.
        """
        dtype = self.keys.dtype
        scores, slope = self._scores()
        weights = scores.sub_(lse[..., None]).exp_()
        weights_grad = wide_product(grad, self.values.mT)
        weights_grad = self._drop(weights_grad)
        scores_grad = weights_grad - sums[..., None]
        scores_grad *= weights
        scores_grad *= self.scale
        if slope is not None:
            scores_grad *= slope
        dropped = self._drop(weights).to(dtype)
        narrow_grad = scores_grad.to(dtype)
        # one product for keys and values: each written gradient is as large as all gathered keys
        padding = self.query.shape[-1] - self.value_dim
        value_grad = F.pad(grad, (0, padding))
        factors = torch.cat((narrow_grad, dropped), dim=1)
        rows = torch.cat((self.query, value_grad), dim=1)
        keys = wide_product(factors.mT, rows)
        query = narrow_grad @ self.keys
        out = dropped @ self.values
        return RowGradients(query, keys, out)

    def as_chunk(self) -> AttentionChunk:
        """The queries as samples of one query each."""
        return AttentionChunk(
            self.query[:, :, None],
            self.keys[:, None],
            self.values[:, None],
            mask=self.mask[:, None],
            is_causal=False,
            scale=self.scale,
        )

    def _scores(self) -> tuple[Tensor, Tensor | None]:
        """Scores [R, N, K], and their derivative by the scores before the softcap."""
        scores = wide_product(self.query, self.keys.mT).mul_(self.scale)
        slope: Tensor | None = None
        cap_scores_(scores, self.softcap)
        if self.softcap is not None:
            slope = 1 - (scores / self.softcap).square()
        scores.masked_fill_(~self.mask, -torch.inf)
        return scores, slope

    def _drop(self, weights: Tensor) -> Tensor:
        """Weights, or their gradients, after dropout."""
        return weights if self.dropout is None else weights * self.dropout


@dataclass(frozen=True)
class SelectedKeys:
    """The keys of consecutive queries."""

    positions: Tensor  # [B, Q, K] int32, ascending; -1 after the last key of a query
    first_query: int  # position of the first query in its sequence

    @classmethod
    def of(cls, mask: Tensor, *, topk: int, first_query: int) -> "SelectedKeys":
        """The keys of a mask [B, Q, S] bool with at most `topk` keys per query."""
        width = min(topk, mask.shape[-1])
        last = mask.cumsum(-1, dtype=torch.int32) - 1
        slots = torch.where(mask, last, width).long()
        numbers = torch.arange(mask.shape[-1], dtype=torch.int32, device=mask.device)
        size = (*mask.shape[:-1], width + 1)  # with a column for keys that are not selected
        positions = numbers.new_full(size, -1)
        positions.scatter_(-1, slots, numbers.expand(slots.shape))
        return cls(positions[..., :width], first_query)

    def rows(self, rows: slice) -> "SelectedKeys":
        """The keys of some of the queries, without columns that none of them uses."""
        num_keys = self.first_query + rows.stop
        positions = self.positions[:, rows, :num_keys]
        return SelectedKeys(positions, self.first_query + rows.start)

    @property
    def mask(self) -> Tensor:
        """[B, Q, K] bool, True where there is a key."""
        return self.positions >= 0

    @property
    def clamped(self) -> Tensor:
        """[B, Q, K] int64, the positions; 0 after the last key of a query."""
        return self.positions.clamp(min=0).long()

    def gather(
        self, query: Tensor, key: Tensor, *, value_dim: int, scale: float, scores: ScoreOptions
    ) -> Rows:
        """The queries [B, Q, N, D] with their rows of keys [B, S, D]."""
        positions = self.clamped
        keys = take_rows(key, positions)
        mask = self.mask.flatten(0, 1)
        rows = Rows(
            query.flatten(0, 1),
            keys.flatten(0, 1),
            mask=mask[:, None],
            value_dim=value_dim,
            scale=scale,
            softcap=scores.softcap,
        )
        if scores.observe is not None:
            scores.observe(rows.as_chunk())
        if scores.dropout is None:
            return rows
        stop = self.first_query + query.shape[1]
        queries = torch.arange(self.first_query, stop, device=query.device)
        dropout = replace(scores.dropout, queries=queries, keys=positions[:, None])
        factors = dropout.factors(query.shape[2], accumulate_dtype(query))
        per_query = factors.transpose(1, 2)
        return replace(rows, dropout=per_query.flatten(0, 1))


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """The product of [R, m, k] and [R, k, n] with sums and result in the accumulation dtype.

    GPUs multiply operands of 16 bits as they are.
    """
    dtype = accumulate_dtype(a)
    if a.is_cuda and a.itemsize == 2:
        return torch.bmm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def cap_scores_(scores: Tensor, softcap: float | None) -> Tensor:
    """Softcap of scores, in place; None: unchanged."""
    if softcap is None:
        return scores
    scores.div_(softcap).tanh_()
    return scores.mul_(softcap)


def part_size(keys: Tensor, gathered: int) -> int:
    """Queries whose keys are gathered at once.

    Args:
        keys: [B, ...], on the device of the attention.
        gathered: elements of the keys of one query.
    """
    device = "cuda" if keys.is_cuda else "cpu"
    numel = GATHERED_NUMEL[device]
    return numel // (len(keys) * gathered)


def split_rows(num_rows: int, size: int) -> Iterator[slice]:
    """Consecutive rows, `size` at a time and at least one."""
    size = max(1, size)
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))


def take_rows(x: Tensor, positions: Tensor) -> Tensor:
    """Rows of [B, S, D] at positions [B, ...] int64 -> [B, ..., D]."""
    flat = _flat_rows(positions, length=x.shape[1])
    taken = x.flatten(0, 1).index_select(0, flat)
    return taken.unflatten(0, positions.shape)


def add_rows(total: Tensor, positions: Tensor, *, values: Tensor) -> None:
    """Add rows [B, ..., D] to [B, S, D] at positions [B, ...] int64, in place and in one order.

    Ranks with the same values get the same sums: on GPUs `index_put_` sorts the positions, while
    `index_add_` adds in any order.
    """
    flat = _flat_rows(positions, length=total.shape[1])
    rows = total.flatten(0, 1)
    values = values.reshape(len(flat), -1)
    if total.is_cuda:
        rows.index_put_((flat,), values, accumulate=True)
    else:
        rows.index_add_(0, flat, values)


def _flat_rows(positions: Tensor, *, length: int) -> Tensor:
    """Positions in sequences [B, ...] -> rows of all sequences, [B * ...]."""
    samples = torch.arange(len(positions), device=positions.device)
    return (positions.flatten(1) + samples[:, None] * length).flatten()
