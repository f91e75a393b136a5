"""Attention to the keys that a lightning indexer selects (DeepSeek-V3.2, section 2.1).

    index score     of a query and a key: sum over index heads i of weight_i * relu(query_i . key),
                    with one key for all heads, equation 1
    selected keys   the K keys with the highest index scores among the allowed ones; of equal scores
                    the earlier key. All layouts select the same keys, because nothing depends on
                    the order in which keys are read
    loss            the divergence KL(p || softmax of the index scores), where p is the mean over
                    the heads of the attention probabilities: over all keys (equation 3), or over
                    the selected keys (equation 4)

    Index              the projections of the indexer, for attention and for the loss
    attend_selected    attention of the queries of a call
    SelectedTiles      the selected keys of each query, a bit per key, as masked tiles

Queries are computed a block at a time, so there is no tensor of all heads, queries and keys. The
loss is differentiated in the forward, where its target is known, with respect to the index alone.

    B batch   Q queries   S keys   N heads   D head dim   I index heads   E width of an index head
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
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

BITS = 8  # bits of a byte


@dataclass(frozen=True)
class IndexerLoss:
    """How the divergence of a microbatch is differentiated and counted."""

    scale: float | Tensor  # factor of the divergence of one query in the differentiated loss
    is_sparse: bool  # whether it is over the selected keys only
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
        """relu(query . key) / sqrt(I E) of some queries and the first keys.

        Returns:
            [B, rows, I, num_keys] in fp32.
        """
        query = self.query[:, rows]
        key = self.key[:, :num_keys]
        dtype = accumulate_dtype(query)
        num_heads, width = query.shape[2:]
        scaled = query.to(dtype).flatten(1, 2) * (num_heads * width) ** -0.5
        products = scaled @ key.to(dtype).mT
        return products.relu_().unflatten(1, (-1, num_heads))


@dataclass(frozen=True)
class SelectedTiles(TilePlan):
    """Blocks of queries, each a tile with its mask of selected keys."""

    # by the first query of a tile: [B, queries, keys / 8] uint8
    bits: dict[int, Tensor] = field(default_factory=dict)

    @property
    def is_one_tile(self) -> bool:
        """Always False: the path for a single tile would leave padding in the output."""
        return False

    @property
    def mask_tensors(self) -> tuple[Tensor, ...]:
        """The selected keys of each tile."""
        return tuple(self.bits.values())

    def with_mask_tensors(self, tensors: Sequence[Tensor]) -> "SelectedTiles":
        """This plan with other selected keys, one tensor per tile, or none."""
        starts = [tile.queries.start for tile in self.tiles]
        return replace(self, bits=dict(zip(starts, tensors, strict=False)))

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
    """Softmax attention to the selected keys, with the gradients of the loss of the index.

    Args:
        query: [B, Q, N, D], N heads of this rank.
        key: [B, S, N, D].
        value: [B, S, N, Dv].
        call: the queries, and the keys that they may attend to.
        index: index of these queries and keys.
        scores: options besides mask and scale; None for none.

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
    """The selected keys, and the gradients of the loss by query, key and weight of the index."""
    allowed = call.masked_tile
    dtype = accumulate_dtype(query)
    loss = index.loss
    sums = _LossSums.zeros(index, dtype)
    # [B, N, S, D], read by the loss only
    wide_key = key if loss is None else key.transpose(1, 2).to(dtype)
    tiles = []
    bits = {}
    for rows, num_keys in _blocks(index, call, num_heads=query.shape[2]):
        tile = Tile(slice(None), rows, slice(0, num_keys), is_masked=True)
        may_attend = allowed.mask(tile)[:, 0]
        products = index.products(rows, num_keys)
        weight = index.weight[:, rows].to(dtype)
        weighted = weight[:, :, None] @ products
        index_scores = weighted[:, :, 0]
        index_scores.masked_fill_(~may_attend, -torch.inf)
        selected = _highest(index_scores, index.topk) & may_attend
        tiles.append(tile)
        bits[rows.start] = _pack_bits(selected)
        if loss is None:
            continue
        loss_mask = selected if loss.is_sparse else may_attend
        queries = query[:, rows].transpose(1, 2)
        keys = wide_key[:, :, :num_keys]
        target = _mean_of_heads(queries, keys, mask=loss_mask, tp=loss.tp)
        log_probs = index_scores.masked_fill_(~loss_mask, -torch.inf).log_softmax(-1)
        cross_entropy = target * log_probs.masked_fill(~loss_mask, 0.0)
        negative_entropy = torch.xlogy(target, target)
        sums.divergence += (negative_entropy - cross_entropy).sum()
        sums.add(index, rows, products=products, grad_scores=log_probs.exp_() - target)
    if loss is not None and loss.sums is not None:
        loss.sums[0] += sums.divergence
        loss.sums[1] += query.shape[:2].numel()
    plan = SelectedTiles(tuple(tiles), allowed.queries, allowed.keys, bits=bits)
    return plan, sums.gradients(index)


@dataclass
class _LossSums:
    """The divergence of a microbatch, and its gradients by the tensors of the index."""

    divergence: Tensor  # fp64 scalar
    query: Tensor  # [B, Q, I, E]
    key: Tensor  # [B, S, E]
    weight: Tensor  # [B, Q, I]

    @classmethod
    def zeros(cls, index: Index, dtype: torch.dtype) -> "_LossSums":
        """The sums before the first block of queries."""
        divergence = torch.zeros((), dtype=torch.float64, device=index.query.device)
        query = torch.zeros_like(index.query, dtype=dtype)
        key = torch.zeros_like(index.key, dtype=dtype)
        weight = torch.zeros_like(index.weight, dtype=dtype)
        return cls(divergence, query, key, weight)

    def add(self, index: Index, rows: slice, *, products: Tensor, grad_scores: Tensor) -> None:
        """Add the gradients of some queries.

        Args:
            index: index of the microbatch.
            rows: the queries.
            products: [B, rows, I, keys], see `Index.products`.
            grad_scores: [B, rows, keys], the gradient of the index scores.
        """
        dtype = grad_scores.dtype
        num_keys = grad_scores.shape[-1]
        grad_weight = products @ grad_scores[..., None]
        self.weight[:, rows] = grad_weight[..., 0]
        weight = index.weight[:, rows].to(dtype)
        grad_products = weight[..., None] * grad_scores[:, :, None]
        grad_products.masked_fill_(products == 0, 0.0)
        grad_products = grad_products.flatten(1, 2)
        scale = index.query[0, 0].numel() ** -0.5
        key = index.key[:, :num_keys].to(dtype)
        query = index.query[:, rows].to(dtype).flatten(1, 2)
        num_heads = weight.shape[2]
        grad_query = (grad_products @ key).unflatten(1, (-1, num_heads))
        grad_key = grad_products.mT @ query
        self.query[:, rows] = grad_query * scale
        self.key[:, :num_keys] += grad_key * scale

    def gradients(self, index: Index) -> list[Tensor]:
        """The gradients in the dtypes of the index, times the scale of the loss."""
        scale = 1.0 if index.loss is None else index.loss.scale
        query = self.query * scale
        key = self.key * scale
        weight = self.weight * scale
        return [
            query.to(index.query.dtype),
            key.to(index.key.dtype),
            weight.to(index.weight.dtype),
        ]


def _blocks(index: Index, call: AttentionCall, *, num_heads: int) -> Iterator[tuple[slice, int]]:
    """Queries whose scores are computed at once, and the number of keys up to the last one."""
    batch, num_queries, num_index_heads, _ = index.query.shape
    scores_per_query = batch * max(num_heads, num_index_heads) * len(call.keys)
    size = max(1, BLOCK_SCORES // scores_per_query)
    for start in range(0, num_queries, size):
        stop = min(start + size, num_queries)
        yield slice(start, stop), call.queries.start + stop


def _highest(scores: Tensor, topk: int) -> Tensor:
    """[..., S] -> bool, True for the highest scores; of equal scores the first."""
    topk = min(topk, scores.shape[-1])
    lowest = scores.topk(topk, dim=-1).values[..., -1:]
    above = scores > lowest
    equal = scores == lowest
    num_equal = topk - above.sum(-1, keepdim=True)
    is_first = equal.cumsum(-1) <= num_equal
    return above | (equal & is_first)


def _pack_bits(mask: Tensor) -> Tensor:
    """[..., S] bool -> [..., S / 8] uint8, the first in the lowest bit; zeros after the last."""
    padded = F.pad(mask, (0, -mask.shape[-1] % BITS))
    bits = padded.unflatten(-1, (-1, BITS)).to(torch.uint8)
    shifts = torch.arange(BITS, dtype=torch.uint8, device=mask.device)
    return (bits << shifts).sum(-1, dtype=torch.uint8)


def _mean_of_heads(query: Tensor, key: Tensor, *, mask: Tensor, tp: Group) -> Tensor:
    """The mean attention probabilities of all heads.

    query [B, N, Q, D], key [B, N, S, D], mask [B or 1, Q, S] -> [B, Q, S].
    """
    scaled = query.to(key.dtype) * query.shape[-1] ** -0.5
    scores = scaled @ key.mT
    scores.masked_fill_(~mask[:, None], -torch.inf)
    summed = scores.softmax(-1).sum(1)
    all_reduce(summed, tp)
    return summed.div_(query.shape[1] * tp.size)


class _AttachGradients(torch.autograd.Function):
    """The first argument unchanged; the backward returns known gradients of the next arguments."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *tensors: Tensor) -> Tensor:
        """`out` unchanged; `tensors` are the inputs, then the known gradients of the inputs."""
        num_inputs = len(tensors) // 2  # followed by their gradients
        ctx.save_for_backward(*tensors[num_inputs:])
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The known gradients of the inputs."""
        known = ctx.saved_tensors  # read once: a recomputed tensor can be read no second time
        return grads[0], *known, *(None for _ in known)
