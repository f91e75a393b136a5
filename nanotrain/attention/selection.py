"""Index scores of a lightning indexer, the keys that they select, and the loss that trains them.

    index score     of a query and a key: sum over index heads i of weight_i * relu(query_i . key),
                    with one key for all heads, equation 1
    selected keys   the K keys with the highest index scores among the allowed ones; of equal scores
                    the earlier key. All layouts select the same keys, because nothing depends on
                    the order in which keys are read
    loss            the divergence KL(p || softmax of the index scores), where p is the mean over
                    the heads of the attention probabilities: over all keys (equation 3), or over
                    the selected keys (equation 4)

    Index            the projections of the indexer, for attention and for the loss
    KeptSelection    the keys that an earlier layer selected, in place of an index
    IndexScores      the scores of some queries
    IndexGradients   the loss of a microbatch and its gradients
    AttachGradients  autograd: known gradients of other tensors

The loss is differentiated in the forward, where its target is known, with respect to the index
alone. Products have operands in the dtype of the index, and sums in fp32. DeepSeek-V3.2 (2025),
section 2.1.

    B batch   Q queries   S keys   K selected keys   I index heads   E width of an index head
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.attention.absorbed import UpProjection
from nanotrain.attention.call import AttentionCall
from nanotrain.attention.chunks import accumulate_dtype
from nanotrain.attention.gathered import add_rows, split_rows, take_rows, wide_product
from nanotrain.comm.group import Group
from nanotrain.spec.kinds.dsa import BLOCK_SCORES


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
    """Index queries, and the index keys of all tokens up to the last query."""

    query: Tensor  # [B, Q, I, E]
    key: Tensor  # [B, S, E]
    weight: Tensor  # [B, Q, I]
    topk: int  # keys per query
    loss: IndexerLoss | None = None  # None: no loss, the gradients are zero
    # the up-projections of compressed keys and values, of which the selected ones are gathered;
    # None for keys and values of each head, of which the others are masked
    up: UpProjection | None = None
    # by call: positions [B, Q, K] of the selected keys, for layers that read them; None: not kept
    kept: dict[int, Tensor] | None = None
    call_number: int = 0  # of the call of attention in the layer

    def keep(self, positions: Tensor) -> None:
        """Keep positions [B, Q, at most K] of selected keys for later layers, if any reads them."""
        if self.kept is not None:
            missing = self.topk - positions.shape[-1]
            self.kept[self.call_number] = F.pad(positions, (0, missing), value=-1)

    def select(self, rows: slice, may_attend: Tensor) -> tuple[Tensor, "IndexScores | None"]:
        """The selected keys [B, rows, keys] bool of some queries, and the scores of all keys."""
        scores = self.scores(rows, self.key[:, : may_attend.shape[-1]])
        return scores.select(may_attend, topk=self.topk), scores

    def gradients(self) -> "IndexGradients | None":
        """The sums of gradients before the first queries."""
        return IndexGradients.zeros(self)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors for which the loss has gradients."""
        return self.query, self.key, self.weight

    @property
    def reads_values(self) -> bool:
        """Whether values are separate tensors, not channels of compressed keys."""
        return self.up is None

    def with_key(self, key: Tensor) -> "Index":
        """The index with other keys [B, S, E]."""
        return replace(self, key=key)

    def for_call(self, number: int, *, num_calls: int, num_keys: int) -> "Index":
        """The index of one of several calls, each with an equal part of the queries."""
        query = self.query.chunk(num_calls, dim=1)[number]
        weight = self.weight.chunk(num_calls, dim=1)[number]
        key = self.key[:, :num_keys]
        return replace(self, query=query, key=key, weight=weight, call_number=number)

    @property
    def has_loss_over_all(self) -> bool:
        """Whether the loss reads the scores of all keys."""
        return self.loss is not None and not self.loss.is_sparse

    def scores(self, rows: slice, keys: Tensor) -> "IndexScores":
        """The index scores of some queries.

        Args:
            rows: the queries.
            keys: [B, keys, E], the first keys; or [B, rows, K, E], keys of each query.
        """
        query = self.query[:, rows]
        num_heads, width = query.shape[2:]
        if keys.dim() == 3:
            flat = wide_product(query.flatten(1, 2), keys.mT)
            products = flat.unflatten(1, (-1, num_heads))
        else:
            flat = wide_product(query.flatten(0, 1), keys.flatten(0, 1).mT)
            products = flat.unflatten(0, query.shape[:2])
        products.relu_()
        weight = self.weight[:, rows].to(products.dtype)
        weight = weight * (num_heads * width) ** -0.5
        summed = weight[:, :, None] @ products
        return IndexScores(products, weight, summed[:, :, 0])

    def blocks(self, call: AttentionCall, *, num_heads: int, size: int) -> Iterator[slice]:
        """Queries whose scores are computed at once.

        Args:
            call: the queries and keys.
            num_heads: heads of attention, whose scores are computed too.
            size: queries at once at most.
        """
        batch, num_queries, num_index_heads, _ = self.query.shape
        largest_heads = max(num_heads, num_index_heads)
        return _blocks(batch * largest_heads * len(call.keys), num_queries=num_queries, size=size)


def _blocks(scores_per_query: int, *, num_queries: int, size: int) -> Iterator[slice]:
    """Queries whose scores are computed at once, `size` at most."""
    return split_rows(num_queries, min(size, BLOCK_SCORES // scores_per_query))


@dataclass(frozen=True)
class KeptSelection:
    """The keys that an earlier layer selected; it has no projections and no loss."""

    positions: Tensor  # [B, Q, K] int32, ascending; -1 after the last key of a query
    key: Tensor  # [B, S, 0], the channels of index keys that it needs
    topk: int  # K
    up: UpProjection | None = None  # as of `Index`
    loss: None = None
    kept: None = None
    tensors: tuple[()] = ()

    @property
    def reads_values(self) -> bool:
        """Whether values are separate tensors; as of `Index`."""
        return self.up is None

    def with_key(self, key: Tensor) -> "KeptSelection":
        """The selection as it is: it reads no index keys."""
        return self

    def for_call(self, number: int, *, num_calls: int, num_keys: int) -> "KeptSelection":
        """The selection of one of several calls; as `Index.for_call`."""
        return replace(self, positions=self.positions.chunk(num_calls, dim=1)[number])

    def keep(self, positions: Tensor) -> None:
        """Keep nothing: the layer that selected the keys keeps them."""

    def select(self, rows: slice, may_attend: Tensor) -> tuple[Tensor, None]:
        """The selected keys [B, rows, keys] bool of some queries; there are no scores."""
        num_keys = may_attend.shape[-1]
        positions = self.positions[:, rows].long()
        size = (*positions.shape[:2], num_keys + 1)  # with a column for keys that are not selected
        mask = may_attend.new_zeros(size)
        mask.scatter_(-1, positions.where(positions >= 0, num_keys), True)
        return mask[..., :num_keys] & may_attend, None

    def gradients(self) -> None:
        """There are no projections."""

    def blocks(self, call: AttentionCall, *, num_heads: int, size: int) -> Iterator[slice]:
        """Queries whose scores are computed at once; as `Index.blocks`."""
        batch, num_queries, _ = self.positions.shape
        return _blocks(batch * num_heads * len(call.keys), num_queries=num_queries, size=size)


AnyIndex = Index | KeptSelection


@dataclass(frozen=True)
class IndexScores:
    """The scores of some queries."""

    products: Tensor  # [B, rows, I, keys] fp32, relu(query . key)
    weight: Tensor  # [B, rows, I] fp32, of the heads, over sqrt(I E)
    summed: Tensor  # [B, rows, keys] fp32, the scores

    def masked(self, mask: Tensor) -> Tensor:
        """[B, rows, keys], minus infinity where the mask is False."""
        return self.summed.masked_fill(~mask, -torch.inf)

    def select(self, may_attend: Tensor, *, topk: int) -> Tensor:
        """[B, rows, keys] bool, the selected ones of the keys to which queries may attend."""
        may_attend = may_attend.expand(self.summed.shape)
        if topk >= may_attend.shape[-1]:
            return may_attend
        return highest(self.masked(may_attend), topk) & may_attend


def highest(scores: Tensor, topk: int) -> Tensor:
    """[..., S] -> bool, True for the highest scores; of equal scores the first."""
    topk = min(topk, scores.shape[-1])
    lowest = scores.topk(topk, dim=-1).values[..., -1:]
    above = scores > lowest
    equal = scores == lowest
    num_equal = topk - above.sum(-1, keepdim=True)
    is_first = equal.cumsum(-1) <= num_equal
    return above | (equal & is_first)


@dataclass
class IndexGradients:
    """The divergence of a microbatch, and its gradients by the tensors of the index."""

    index: Index
    divergence: Tensor  # fp64 scalar
    query: Tensor  # [B, Q, I, E]
    key: Tensor  # [B, S, E]
    weight: Tensor  # [B, Q, I]

    @classmethod
    def zeros(cls, index: Index) -> "IndexGradients":
        """The sums before the first queries."""
        dtype = accumulate_dtype(index.query)
        divergence = torch.zeros((), dtype=torch.float64, device=index.query.device)
        query, key, weight = (torch.zeros_like(x, dtype=dtype) for x in index.tensors)
        return cls(index, divergence, query, key, weight)

    def add(
        self, rows: slice, *, scores: IndexScores, mask: Tensor, target: Tensor, keys: "IndexKeys"
    ) -> None:
        """Add the loss of some queries.

        Args:
            rows: the queries.
            scores: their index scores.
            mask: [B, rows, keys] bool, True for the keys that the loss is over.
            target: [B, rows, keys], probabilities of attention.
            keys: the keys of the scores.
        """
        log_probs = scores.masked(mask).log_softmax(-1)
        log_probs.masked_fill_(~mask, -torch.inf)  # NaN where a query has no key
        cross_entropy = target * log_probs.masked_fill(~mask, 0.0)
        negative_entropy = torch.xlogy(target, target)
        self.divergence += (negative_entropy - cross_entropy).sum()
        grad_scores = log_probs.exp_() - target
        num_heads, width = self.index.query.shape[2:]
        grad_weight = scores.products @ grad_scores[..., None]
        self.weight[:, rows] = grad_weight[..., 0] * (num_heads * width) ** -0.5
        grad_products = scores.weight[..., None] * grad_scores[:, :, None]
        grad_products.masked_fill_(scores.products == 0, 0.0)
        query = self.index.query[:, rows]
        narrow = grad_products.to(query.dtype)
        self.query[:, rows] = keys.grad_query(narrow)
        keys.add_grad(narrow, query, total=self.key)

    def finish(self) -> list[Tensor]:
        """Add the loss to the sums of the layer; returns the gradients of the index.

        They have the dtypes of the index, and are multiplied by the scale of the loss.
        """
        loss = self.index.loss
        scale: float | Tensor = 1.0
        if loss is not None:
            scale = loss.scale
        if loss is not None and loss.sums is not None:
            loss.sums[0] += self.divergence
            loss.sums[1] += self.query.shape[:2].numel()
        gradients = (self.query, self.key, self.weight)
        pairs = zip(gradients, self.index.tensors, strict=True)
        return [(gradient * scale).to(tensor.dtype) for gradient, tensor in pairs]


@dataclass(frozen=True)
class IndexKeys:
    """The first index keys, which all queries share."""

    keys: Tensor  # [B, keys, E]

    def grad_query(self, grad_products: Tensor) -> Tensor:
        """[B, rows, I, keys] -> [B, rows, I, E]."""
        num_heads = grad_products.shape[2]
        grad = wide_product(grad_products.flatten(1, 2), self.keys)
        return grad.unflatten(1, (-1, num_heads))

    def add_grad(self, grad_products: Tensor, query: Tensor, *, total: Tensor) -> None:
        """Add the gradient of the keys to [B, S, E]; query [B, rows, I, E]."""
        flat = grad_products.flatten(1, 2)
        grad = wide_product(flat.mT, query.flatten(1, 2))
        total[:, : grad.shape[1]] += grad


@dataclass(frozen=True)
class GatheredIndexKeys(IndexKeys):
    """Index keys of each query."""

    keys: Tensor  # [B, rows, K, E]
    positions: Tensor  # [B, rows, K] int64

    @classmethod
    def of(cls, keys: Tensor, positions: Tensor) -> "GatheredIndexKeys":
        """The keys [B, S, E] at positions [B, rows, K]."""
        return cls(take_rows(keys, positions), positions)

    def grad_query(self, grad_products: Tensor) -> Tensor:
        """[B, rows, I, K] -> [B, rows, I, E]."""
        flat = grad_products.flatten(0, 1)
        grad = wide_product(flat, self.keys.flatten(0, 1))
        return grad.unflatten(0, grad_products.shape[:2])

    def add_grad(self, grad_products: Tensor, query: Tensor, *, total: Tensor) -> None:
        """Add the gradient of the keys to [B, S, E]; query [B, rows, I, E]."""
        flat = grad_products.flatten(0, 1)
        grad = wide_product(flat.mT, query.flatten(0, 1))
        add_rows(total, self.positions, values=grad)


class AttachGradients(torch.autograd.Function):
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
