"""Attention to the keys that a lightning indexer selects: DeepSeek Sparse Attention (DeepSeek-V3.2,
section 2.1).

    index score     of a query and a key: sum over index heads i of weight_i * relu(query_i . key), with one key for all
                    heads, equation 1
    selected keys   the K with the highest index scores among those that the query may attend to; of equal ones the
                    earlier. All layouts select the same, because nothing depends on the order in which keys are read
    loss            the divergence KL(p || softmax of the index scores), where p is the mean over the heads of the
                    attention probabilities: over all keys (equation 3), or over the selected ones (equation 4)

    Index              what the indexer computes, for attention and for the loss
    attend_selected    attention of the queries of a call
    SelectedTiles      the selected keys of each query, a bit per key, as masked tiles

Queries are computed a block at a time, so there is no tensor of all heads, queries and keys. The
loss is differentiated in the forward, where its target is known, with respect to the index alone.

    B batch   Q queries   S keys   N heads   D head dim   I index heads   E width of an index head
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.attention.call import AttentionCall
from nanotrain.attention.chunks import ScoreOptions, accumulate_dtype
from nanotrain.attention.tiles import Tile, TilePlan, attend_tiles
from nanotrain.comm.collectives import all_reduce
from nanotrain.comm.group import Group
from nanotrain.spec.kinds.dsa import BLOCK_SCORES

BITS = 8  # of a byte


@dataclass(frozen=True)
class IndexerLoss:
    """How the divergence of a microbatch is differentiated and counted."""

    scale: float | Tensor  # of the divergence of one query in the differentiated loss
    is_sparse: bool  # over the selected keys alone
    tp: Group  # ranks with other heads
    # [2], to which the divergences and the number of queries are added; None: not counted
    sums: Tensor | None


@dataclass(frozen=True)
class Index:
    """The indexer's projections of queries and of the keys up to the last of them."""

    query: Tensor  # [B, Q, I, E]
    key: Tensor  # [B, S, E]
    weight: Tensor  # [B, Q, I]
    topk: int  # keys per query
    loss: IndexerLoss | None = None  # None: gradients, if any, are zero

    def products(self, rows: slice, num_keys: int) -> Tensor:
        """relu(query . key) / sqrt(I E) of some queries and the first keys, [B, rows, I, num_keys]
        in fp32.
        """
        query, key = self.query[:, rows], self.key[:, :num_keys]
        dtype, num_heads, width = accumulate_dtype(query), *query.shape[2:]
        scaled = query.to(dtype).flatten(1, 2) * (num_heads * width) ** -0.5
        return (scaled @ key.to(dtype).mT).relu_().unflatten(1, (-1, num_heads))


@dataclass(frozen=True)
class SelectedTiles(TilePlan):
    """Blocks of queries, each a tile with a mask of its own."""

    # by the first query: [B, queries, keys / 8] uint8
    bits: dict[int, Tensor] = field(default_factory=dict)

    @property
    def is_one_tile(self) -> bool:
        """False: the output of a single tile too is written without padding, as the next layer
        reads it.
        """
        return False

    def mask(self, tile: Tile | None = None) -> Tensor:
        """[B, 1, queries, keys] bool, True where a key is selected."""
        tile = tile or self.tiles[0]
        bits = self.bits[tile.queries.start]
        unpacked = (bits[..., None] >> torch.arange(BITS, device=bits.device)) & 1
        return unpacked.flatten(-2)[:, None, :, : tile.keys.stop].bool()


def attend_selected(
    query: Tensor,
    *,
    key: Tensor,
    value: Tensor,
    call: AttentionCall,
    index: Index,
    scores: ScoreOptions | None,
) -> Tensor:
    """Softmax attention to the selected keys; its backward also differentiates the loss of the
    index.

    Args:
        query: [B, Q, N, D], N heads of this rank.
        key: [B, S, N, D].
        value: [B, S, N, Dv].
        call: the queries, and the keys that they may attend to.
        index: of these queries and keys.
        scores: options beside mask and scale; None for none.

    Returns:
        [B, Q, N, Dv].
    """
    plan, gradients = _select(index, call=call, query=query.detach(), key=key.detach())
    out = attend_tiles(query, key=key, value=value, plan=plan, scores=scores)
    if torch.is_grad_enabled():
        out = _AttachGradients.apply(out, index.query, index.key, index.weight, *gradients)
    return out


@torch.no_grad()
def _select(
    index: Index, *, call: AttentionCall, query: Tensor, key: Tensor
) -> tuple[SelectedTiles, list[Tensor]]:
    """The selected keys, and the gradients of the loss with respect to the tensors of the index."""
    allowed, dtype, loss = call.masked_tile, accumulate_dtype(query), index.loss
    key = key.transpose(1, 2).to(dtype) if loss is not None else key
    grads = [torch.zeros_like(x, dtype=dtype) for x in (index.query, index.key, index.weight)]
    divergence, tiles, bits = torch.zeros((), dtype=torch.float64, device=query.device), [], {}
    for rows, num_keys in _blocks(index, call, num_heads=query.shape[2]):
        tile = Tile(slice(None), rows, slice(0, num_keys), is_masked=True)
        products, may_attend = index.products(rows, num_keys), allowed.mask(tile)[:, 0]
        weight = index.weight[:, rows].to(dtype)
        index_scores = (weight[:, :, None] @ products)[:, :, 0].masked_fill_(
            ~may_attend, -torch.inf
        )
        selected = _highest(index_scores, index.topk) & may_attend
        tiles.append(tile)
        bits[rows.start] = _packed(selected)
        if loss is None:
            continue
        seen = selected if loss.is_sparse else may_attend
        target = _mean_of_heads(
            query[:, rows].transpose(1, 2), key[:, :, :num_keys], mask=seen, tp=loss.tp
        )
        log_probs = index_scores.masked_fill_(~seen, -torch.inf).log_softmax(-1)
        divergence += (
            torch.xlogy(target, target) - target * log_probs.masked_fill(~seen, 0.0)
        ).sum()
        grad = log_probs.exp_() - target  # of the scores
        grads[2][:, rows] = (products @ grad[..., None])[..., 0]
        through = (
            (weight[..., None] * grad[:, :, None]).masked_fill_(products == 0, 0.0).flatten(1, 2)
        )
        scale = index.query[0, 0].numel() ** -0.5
        grads[0][:, rows] = (through @ index.key[:, :num_keys].to(dtype)).unflatten(
            1, (-1, weight.shape[2])
        ) * scale
        grads[1][:, :num_keys] += through.mT @ index.query[:, rows].to(dtype).flatten(1, 2) * scale
    if loss is not None and loss.sums is not None:
        loss.sums[0] += divergence
        loss.sums[1] += query.shape[:2].numel()
    grads = [grad * loss.scale for grad in grads] if loss is not None else grads
    like = (index.query, index.key, index.weight)
    return SelectedTiles(tuple(tiles), allowed.queries, allowed.keys, bits=bits), [
        grad.to(x.dtype) for grad, x in zip(grads, like, strict=True)
    ]


def _blocks(index: Index, call: AttentionCall, *, num_heads: int) -> Iterator[tuple[slice, int]]:
    """Queries whose scores are computed at once, and the number of keys up to the last of them."""
    batch, num_queries, num_index_heads, _ = index.query.shape
    size = max(1, BLOCK_SCORES // (batch * max(num_heads, num_index_heads) * len(call.keys)))
    for start in range(0, num_queries, size):
        stop = min(start + size, num_queries)
        yield slice(start, stop), call.queries.start + stop


def _highest(scores: Tensor, topk: int) -> Tensor:
    """[..., S] -> bool, True for the highest ones; of equal scores the first ones."""
    topk = min(topk, scores.shape[-1])
    lowest = scores.topk(topk, dim=-1).values[..., -1:]
    above, equal = scores > lowest, scores == lowest
    return above | (equal & (equal.cumsum(-1) <= topk - above.sum(-1, keepdim=True)))


def _packed(mask: Tensor) -> Tensor:
    """[..., S] bool -> [..., S / 8] uint8, the first in the lowest bit; zeros after the last."""
    bytes_ = F.pad(mask, (0, -mask.shape[-1] % BITS)).unflatten(-1, (-1, BITS)).to(torch.uint8)
    return (bytes_ << torch.arange(BITS, dtype=torch.uint8, device=mask.device)).sum(
        -1, dtype=torch.uint8
    )


def _mean_of_heads(query: Tensor, key: Tensor, *, mask: Tensor, tp: Group) -> Tensor:
    """Attention probabilities of all heads: query [B, N, Q, D], key [B, N, S, D], mask [B or 1, Q,
    S] -> [B, Q, S].
    """
    scores = (query.to(key.dtype) * query.shape[-1] ** -0.5) @ key.mT
    summed = scores.masked_fill_(~mask[:, None], -torch.inf).softmax(-1).sum(1)
    all_reduce(summed, tp)
    return summed.div_(query.shape[1] * tp.size)


class _AttachGradients(torch.autograd.Function):
    """The first tensor; its backward gives the others gradients that are known already."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors[len(tensors) // 2 :])
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        known = ctx.saved_tensors  # read once: a recomputed tensor can be read no second time
        return grads[0], *known, *(None for _ in known)
