"""Blocks of keys that an index selects for a query, and the loss that trains the index.

    block score      of a query, a group of heads and a block: the largest product of the index
                     query of the group with an index key of the block that the query may attend to
    selected blocks  the K blocks with the highest scores, always with the block of the query and
                     the ones just before it; of equal scores the earlier block
    loss             the divergence KL(p || softmax of the block scores / sqrt(E)), where p is the
                     probability that the heads of the group give to the keys of a block, on
                     average: over all blocks, or over the selected ones

    BlockIndex       the projections of the indexer
    KeyBlocks        the blocks of a call
    BlockSelection   the selected blocks of a call, and the gradients of the loss

Blocks begin where documents begin, so a document selects the same keys at any position of a
sequence. A slot is a place of a key in equally long blocks, of which the last one of a document may
have empty slots.

As in selection.py the loss is differentiated in the forward, with respect to the index alone.
MiniMax-M3 (2026), as in transformers; MoBA (2025), section 2.2, pools keys likewise.

    B batch   Q queries   S keys   N heads   G groups of heads with one key   E width of the index
    M blocks   L keys of a block
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from nanotrain.attention.call import AttentionCall
from nanotrain.attention.chunks import accumulate_dtype
from nanotrain.attention.gathered import (
    add_rows,
    cap_scores_,
    split_rows,
    take_rows,
    wide_product,
)
from nanotrain.attention.selection import IndexerLoss, highest
from nanotrain.attention.tiles import first_of_chunks, on_device
from nanotrain.spec.kinds.dsa import BLOCK_SCORES


@dataclass(frozen=True)
class BlockIndex:
    """Index queries, and the index keys of all tokens up to the last query."""

    query: Tensor  # [B, Q, G, E]
    key: Tensor  # [B, S, E]
    size: int  # keys of a block
    topk: int  # blocks per query
    # blocks that every query attends to: the block of the query and the ones just before it
    num_local: int
    loss: IndexerLoss | None = None  # None: no loss, the gradients are zero
    gathers: bool = False  # whether attention gathers the selected blocks; else it masks the others

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """The tensors for which the loss has gradients."""
        return self.query, self.key

    @property
    def reads_values(self) -> bool:
        """Always True: values are separate tensors, not channels of the keys."""
        return True

    def with_key(self, key: Tensor) -> "BlockIndex":
        """The index with other keys [B, S, E]."""
        return replace(self, key=key)

    def for_call(self, number: int, *, num_calls: int, num_keys: int) -> "BlockIndex":
        """The index of one of several calls, each with an equal part of the queries."""
        queries = self.query.chunk(num_calls, dim=1)
        key = self.key[:, :num_keys]
        return replace(self, query=queries[number], key=key)


@dataclass(frozen=True)
class KeyBlocks:
    """The blocks of keys of a call."""

    size: int
    host_numbers: np.ndarray  # [B or 1, S] int64, the block of each key
    numbers: Tensor  # the same on the device
    first_keys: Tensor  # [B or 1, M] int64, of each block; S after the last block of a sample
    documents: Tensor  # [B or 1, S] int64, the first block of the document of each key

    @classmethod
    def of(cls, call: AttentionCall, size: int) -> "KeyBlocks":
        """The blocks of a call, planned once for all layers."""
        name = f"blocks of {size} keys"
        if name not in call.kernel_plans:
            call.kernel_plans[name] = cls._plan(call, size)
        blocks: KeyBlocks = call.kernel_plans[name]
        return blocks

    @classmethod
    def _plan(cls, call: AttentionCall, size: int) -> "KeyBlocks":
        """Number the blocks of every sample; a block never spans two documents."""
        num_keys = len(call.keys)
        spans = call.spans
        starts = spans.first_keys if spans.starts is None else spans.starts
        starts = starts[:, :num_keys]
        positions = np.arange(num_keys)
        first = first_of_chunks(positions, starts, size=size)
        is_first = first == positions
        numbers = is_first.cumsum(axis=1) - 1
        num_blocks = numbers.max() + 1
        first_keys = np.full((len(numbers), num_blocks), num_keys)
        samples, keys = np.nonzero(is_first)
        blocks = numbers[samples, keys]
        first_keys[samples, blocks] = keys
        documents = np.take_along_axis(numbers, starts, axis=1)
        arrays = (numbers, first_keys, documents)
        tensors = [on_device(array, call.device) for array in arrays]
        return cls(size, numbers, *tensors)

    @property
    def num_keys(self) -> int:
        """Keys of a sequence (S)."""
        return self.numbers.shape[1]

    def num_before(self, query: int) -> int:
        """Blocks up to the block of a query, in the sample that has the most."""
        last = self.host_numbers[:, query].max()
        return int(last) + 1

    @cached_property
    def slots(self) -> Tensor:
        """[B or 1, M, L] int64, the key of each slot; of an empty slot any key."""
        return self._positions.clamp(max=self.num_keys - 1)

    @cached_property
    def is_key(self) -> Tensor:
        """[B or 1, M, L] bool, False for empty slots."""
        slots = self.slots
        found = self.numbers.gather(1, slots.flatten(1))
        found = found.view_as(slots)
        num_blocks = slots.shape[1]
        blocks = torch.arange(num_blocks, device=slots.device)
        is_in_block = found == blocks[:, None]
        is_in_sequence = self._positions < self.num_keys
        return is_in_block & is_in_sequence

    @property
    def _positions(self) -> Tensor:
        offsets = torch.arange(self.size, device=self.first_keys.device)
        return self.first_keys[..., None] + offsets

    def may_attend(self, queries: Tensor, num_blocks: int) -> Tensor:
        """[B or 1, Q, num_blocks, L] bool: slots with keys of the document, up to the query.

        Args:
            queries: [Q] int64, positions.
            num_blocks: the first blocks.
        """
        slots = self.slots[:, None, :num_blocks]
        is_key = self.is_key[:, None, :num_blocks]
        blocks = torch.arange(num_blocks, device=queries.device)
        first_blocks = self.documents[:, queries]
        is_document = blocks >= first_blocks[..., None]
        is_before = slots <= queries[:, None, None]
        may_attend = is_before & is_key
        return may_attend & is_document[..., None]

    def distances(self, queries: Tensor, num_blocks: int) -> Tensor:
        """[B or 1, Q, num_blocks] int64, blocks from each block to the block of a query."""
        blocks = torch.arange(num_blocks, device=queries.device)
        own_blocks = self.numbers[:, queries]
        return own_blocks[..., None] - blocks

    def to_slots(self, x: Tensor, num_blocks: int) -> Tensor:
        """Rows of keys [B, S, D] -> of the slots of the first blocks, [B, num_blocks * L, D]."""
        slots = self.slots[:, :num_blocks]
        slots = slots.flatten(1)
        slots = slots.expand(len(x), -1)
        return take_rows(x, slots)


@dataclass(frozen=True)
class BlockScores:
    """The block scores of some queries."""

    products: Tensor  # [B, rows, G, M, L] fp32, minus infinity where a query may not attend
    largest: Tensor  # [B, rows, G, M], the scores
    slot: Tensor  # [B, rows, G, M] int64, of the largest product

    @classmethod
    def of(cls, query: Tensor, slots: Tensor, *, may_attend: Tensor) -> "BlockScores":
        """The scores of index queries [B, rows, G, E] and slots of index keys [B, M * L, E].

        Args:
            query: index queries.
            slots: index keys.
            may_attend: [B or 1, rows, M, L] bool.
        """
        flat = wide_product(query.flatten(1, 2), slots.mT)
        products = flat.unflatten(1, query.shape[1:3])
        products = products.unflatten(-1, may_attend.shape[2:])
        is_masked = ~may_attend[:, :, None]
        products.masked_fill_(is_masked, -torch.inf)
        largest, slot = products.max(-1)
        return cls(products, largest, slot)

    def select(self, distances: Tensor, *, topk: int, num_local: int) -> Tensor:
        """[B, rows, G, M] bool, the selected blocks; distances [B or 1, rows, M]."""
        may_attend = self.largest > -torch.inf
        is_near = distances < num_local
        is_local = is_near[:, :, None] & may_attend
        ranked = self.largest.masked_fill(is_local, torch.inf)
        is_highest = highest(ranked, topk)
        return is_highest & may_attend


class BlockSelection:
    """The selected blocks of a call, and the gradients of the loss, some queries at a time.

    Args:
        index: index of the queries and keys of the call.
        call: the queries, and the keys that they may attend to.
        softcap: bound of the scores of attention; None for none.

    Attributes:
        selected: [B, G, rows, M] bool, which of the first M blocks are selected, by the first of
            the queries that were selected for together.
    """

    def __init__(self, index: BlockIndex, call: AttentionCall, *, softcap: float | None) -> None:
        self.index = index
        self.call = call
        self.softcap = softcap
        self.blocks = KeyBlocks.of(call, index.size)
        self.selected: dict[int, Tensor] = {}
        dtype = accumulate_dtype(index.query)
        self._divergence = torch.zeros((), dtype=torch.float64, device=index.query.device)
        self._query_grad = torch.zeros_like(index.query, dtype=dtype)
        self._key_grad = torch.zeros_like(index.key, dtype=dtype)

    @property
    def selects_all(self) -> bool:
        """Whether every query attends to all blocks before it."""
        return self.index.topk >= self.blocks.first_keys.shape[1]

    @torch.no_grad()
    def run(self, query: Tensor, key: Tensor) -> None:
        """Select for queries [B, Q, N, D] and keys [B, S, G, D] of attention."""
        if self.selects_all and self.index.loss is None:
            return
        batch, num_queries, num_heads, _ = query.shape
        num_slots = self.blocks.slots[0].numel()
        scores_per_query = batch * num_heads * num_slots
        size = BLOCK_SCORES // scores_per_query
        for rows in split_rows(num_queries, size):
            self._select(rows, query=query[:, rows], key=key)

    def _select(self, rows: slice, *, query: Tensor, key: Tensor) -> None:
        """Select for some queries."""
        index = self.index
        blocks = self.blocks
        positions = self.call.queries[rows]
        last_query = positions.stop - 1
        num_blocks = blocks.num_before(last_query)
        queries = torch.arange(positions.start, positions.stop, device=query.device)
        may_attend = blocks.may_attend(queries, num_blocks)
        slots = blocks.to_slots(index.key, num_blocks)
        scores = BlockScores.of(index.query[:, rows], slots, may_attend=may_attend)
        distances = blocks.distances(queries, num_blocks)
        selected = scores.select(distances, topk=index.topk, num_local=index.num_local)
        per_group = selected.transpose(1, 2)
        self.selected[rows.start] = per_group.contiguous()
        if index.loss is None:
            return
        is_counted = scores.largest > -torch.inf
        if index.loss.is_sparse:
            is_counted = selected
        mask = may_attend[:, :, None] & is_counted[..., None]
        target = self._target(query, key, mask=mask)
        grads = self._loss_gradients(scores, mask=is_counted, target=target)
        self._add_gradients(rows, grads, slots=slots)

    def _add_gradients(self, rows: slice, grads: Tensor, *, slots: Tensor) -> None:
        """Add the gradients of some queries.

        Args:
            rows: the queries.
            grads: [B, rows, G, M, L], of the products.
            slots: [B, M * L, E], index keys.
        """
        num_blocks = grads.shape[3]
        index_query = self.index.query[:, rows]
        flat = grads.flatten(3)
        flat = flat.flatten(1, 2)  # [B, rows * G, M * L]
        flat = flat.to(index_query.dtype)
        query_grad = wide_product(flat, slots)
        self._query_grad[:, rows] = query_grad.view_as(index_query)
        key_grad = wide_product(flat.mT, index_query.flatten(1, 2))
        positions = self.blocks.slots[:, :num_blocks]
        positions = positions.flatten(1)
        positions = positions.expand(len(flat), -1)
        add_rows(self._key_grad, positions, values=key_grad)

    def _target(self, query: Tensor, key: Tensor, *, mask: Tensor) -> Tensor:
        """The mean probability of the blocks over the heads of each group.

        query [B, rows, N, D], key [B, S, G, D], mask [B, rows, G, M, L] -> [B, rows, G, M].
        """
        num_groups, num_blocks, size = mask.shape[2:]
        slots = self.blocks.to_slots(key.flatten(2), num_blocks)
        slots = slots.unflatten(-1, (num_groups, -1))
        slots = slots.transpose(1, 2)  # [B, G, M * L, D]
        grouped = query.unflatten(2, (num_groups, -1))
        grouped = grouped.transpose(1, 2)  # [B, G, rows, N / G, D]
        flat = grouped.flatten(2, 3)
        products = wide_product(flat.flatten(0, 1), slots.flatten(0, 1).mT)
        products.mul_(query.shape[-1] ** -0.5)
        scores = products.view(*grouped.shape[:4], -1)
        cap_scores_(scores, self.softcap)
        per_group = mask.transpose(1, 2)
        per_group = per_group.flatten(3)
        is_masked = ~per_group[:, :, :, None]
        scores.masked_fill_(is_masked, -torch.inf)
        weights = scores.softmax(-1)
        mean = weights.mean(3)  # [B, G, rows, M * L]
        mean = mean.unflatten(-1, (num_blocks, size))
        per_block = mean.sum(-1)
        return per_block.transpose(1, 2)

    def _loss_gradients(self, scores: BlockScores, *, mask: Tensor, target: Tensor) -> Tensor:
        """Add up the divergence; returns its gradient by the products, [B, rows, G, M, L]."""
        scale = self.index.query.shape[-1] ** -0.5
        scaled = scores.largest * scale
        scaled.masked_fill_(~mask, -torch.inf)
        log_probs = scaled.log_softmax(-1)
        negative_cross_entropy = target * log_probs.masked_fill(~mask, 0.0)
        negative_entropy = torch.xlogy(target, target)
        divergence = negative_entropy - negative_cross_entropy
        self._divergence += divergence.sum()
        grad = log_probs.exp() - target
        grad *= scale
        grads = torch.zeros_like(scores.products)
        slot = scores.slot[..., None]
        return grads.scatter_(-1, slot, grad[..., None])

    def gradients(self) -> list[Tensor]:
        """Add the loss to the sums of the layer; returns the gradients of the index.

        Both are means over all groups.
        """
        index = self.index
        num_groups = index.query.shape[2]
        loss = index.loss
        scale: float | Tensor = 1.0
        if loss is not None:
            scale = loss.scale / (num_groups * loss.tp.size)
        if loss is not None and loss.sums is not None:
            rows = index.query.shape[:2]
            loss.sums[0] += self._divergence / num_groups
            loss.sums[1] += rows.numel()
        query_grad = self._query_grad * scale
        key_grad = self._key_grad * scale
        return [query_grad.to(index.query.dtype), key_grad.to(index.key.dtype)]
