"""Attention to selected blocks of keys (blocks.py) that reads no other keys.

The query heads of a group attend to the same keys, so they are the rows of one matrix product with
the keys of a query, which are gathered for some queries at a time, and again in the backward.

    attend_gathered_blocks    attention of the queries of a call
    ChosenBlocks              the selected blocks of each query, by number

    B batch   Q queries   S keys   N heads   G key/value heads   D, Dv head dims   K selected keys
    T selected blocks   L keys of a block   R = B * G * Q
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanotrain.attention.blocks import BlockSelection, KeyBlocks
from nanotrain.attention.chunk_kernels import AttentionChunk, AttentionResult
from nanotrain.attention.chunks import ScoreOptions, accumulate_dtype, chunk_backward, chunk_forward
from nanotrain.attention.gathered import (
    SelectedKeys,
    add_rows,
    part_size,
    split_rows,
    take_rows,
)


@dataclass(frozen=True)
class ChosenBlocks:
    """The selected blocks of consecutive queries."""

    numbers: Tensor  # [B, G, Q, T] int32, ascending; -1 after the last block of a query
    blocks: KeyBlocks
    first_query: int  # position of the first query in its sequence

    @classmethod
    def of(cls, selection: BlockSelection, num_queries: int) -> "ChosenBlocks":
        """The selected blocks of all queries of a call."""
        index = selection.index
        batch, _, num_groups, _ = index.query.shape
        size = (batch, num_groups, num_queries, index.topk)
        numbers = index.query.new_full(size, -1, dtype=torch.int32)
        for start, selected in selection.selected.items():
            mask = selected.flatten(0, 1)
            keys = SelectedKeys.of(mask, topk=index.topk, first_query=0)
            found = keys.positions.unflatten(0, (batch, num_groups))
            num_rows, num_found = found.shape[2:]
            numbers[:, :, start : start + num_rows, :num_found] = found
        return cls(numbers, selection.blocks, selection.call.queries.start)

    def rows(self, rows: slice) -> "ChosenBlocks":
        """The blocks of some of the queries."""
        first_query = self.first_query + rows.start
        return replace(self, numbers=self.numbers[:, :, rows], first_query=first_query)

    def keys(self) -> tuple[Tensor, Tensor]:
        """Positions of the keys [B, G, Q, K] int64, and whether each of them is a key, bool."""
        batch, num_groups, num_queries, _ = self.numbers.shape
        numbers = self.numbers.clamp(min=0)
        numbers = numbers.long()
        slots = self.blocks.slots.expand(batch, -1, -1)
        is_key = self.blocks.is_key.expand(batch, -1, -1)
        positions = take_rows(slots, numbers)
        is_chosen = self.numbers >= 0
        mask = take_rows(is_key, numbers) & is_chosen[..., None]
        stop = self.first_query + num_queries
        queries = torch.arange(self.first_query, stop, device=numbers.device)
        mask &= positions <= queries[:, None, None]
        return positions.flatten(3), mask.flatten(3)


def attend_gathered_blocks(
    query: Tensor,
    *,
    key: Tensor,
    value: Tensor,
    chosen: ChosenBlocks,
    scores: ScoreOptions | None,
) -> Tensor:
    """Softmax attention to the selected blocks.

    Args:
        query: [B, Q, N, D].
        key: [B, S, G, D].
        value: [B, S, G, Dv].
        chosen: the blocks of each query.
        scores: an observer of the logits; None without one.

    Returns:
        [B, Q, N, Dv].
    """
    out: Tensor = _AttendChosen.apply(query, key, value, chosen.numbers, chosen, scores)
    return out


class _AttendChosen(torch.autograd.Function):
    """Attention to chosen blocks, with a backward that gathers the keys again.

    Queries [B, Q, N, D], keys [B, S, G, D], values [B, S, G, Dv], numbers of the blocks, the blocks
    and score options -> [B, Q, N, Dv].
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        numbers, chosen, scores = rest
        inputs = _GatheredInputs.of(query, key=key, value=value)
        out = query.new_empty((*query.shape[:3], value.shape[-1]))
        lse = query.new_empty(query.shape[:3], dtype=accumulate_dtype(query))
        for rows in inputs.parts(chosen):
            chunk, _ = inputs.chunk(rows, chosen)
            if scores is not None and scores.observe is not None:
                inputs.observe(chunk, scores)
            result = chunk_forward(chunk)
            out[:, rows] = inputs.to_heads(result.out)
            lse[:, rows] = inputs.to_heads(result.lse[..., None])[..., 0]
        # an attribute of `ctx` stays in memory where the saved tensors are recomputed or offloaded
        ctx.blocks = chosen.blocks
        ctx.first_query = chosen.first_query
        ctx.save_for_backward(query, key, value, numbers, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, numbers, out, lse = ctx.saved_tensors
        chosen = ChosenBlocks(numbers, ctx.blocks, ctx.first_query)
        inputs = _GatheredInputs.of(query, key=key, value=value)
        dtype = accumulate_dtype(query)
        query_grad = torch.empty_like(query)
        key_grad = torch.zeros_like(inputs.key, dtype=dtype)
        value_grad = torch.zeros_like(inputs.value, dtype=dtype)
        for rows in inputs.parts(chosen):
            chunk, positions = inputs.chunk(rows, chosen)
            row_lse = inputs.to_rows(lse[:, rows, :, None])[..., 0]
            merged = AttentionResult(inputs.to_rows(out[:, rows]), row_lse)
            found = chunk_backward(chunk, merged, grad=inputs.to_rows(grads[0][:, rows]))
            query_grad[:, rows] = inputs.to_heads(found.query)
            add_rows(key_grad, positions, values=found.key.to(dtype))
            add_rows(value_grad, positions, values=found.value.to(dtype))
        return query_grad, inputs.per_key(key_grad), inputs.per_key(value_grad), None, None, None


@dataclass(frozen=True)
class _GatheredInputs:
    """Queries, and the rows of keys and values by sample and group."""

    query: Tensor  # [B, Q, N, D]
    key: Tensor  # [B * G, S, D]
    value: Tensor  # [B * G, S, Dv]
    num_groups: int

    @classmethod
    def of(cls, query: Tensor, *, key: Tensor, value: Tensor) -> "_GatheredInputs":
        """The inputs of attention."""
        keys = key.transpose(1, 2)
        values = value.transpose(1, 2)
        return cls(query, keys.flatten(0, 1), values.flatten(0, 1), key.shape[2])

    def parts(self, chosen: ChosenBlocks) -> list[slice]:
        """Queries whose keys are gathered at once."""
        num_keys = chosen.numbers.shape[-1] * chosen.blocks.size
        width = max(self.key.shape[-1], self.value.shape[-1])
        size = part_size(self.key, num_keys * width)
        return list(split_rows(self.query.shape[1], size))

    def chunk(self, rows: slice, chosen: ChosenBlocks) -> tuple[AttentionChunk, Tensor]:
        """Some queries as samples of their own, and the positions [B * G, rows * K] of their keys.

        The heads of a group take the place of queries.
        """
        positions, mask = chosen.rows(rows).keys()
        num_keys = positions.shape[-1]
        positions = positions.flatten(0, 1).flatten(1)
        query = self.to_rows(self.query[:, rows])
        keys = take_rows(self.key, positions)
        values = take_rows(self.value, positions)
        row_mask = mask.flatten(0, 2)
        row_mask = row_mask[:, None, None].expand(-1, -1, query.shape[2], -1)
        chunk = AttentionChunk(
            query,
            keys.view(-1, 1, num_keys, keys.shape[-1]),
            values.view(-1, 1, num_keys, values.shape[-1]),
            mask=row_mask,
            is_causal=False,
            scale=query.shape[-1] ** -0.5,
        )
        return chunk, positions

    def to_rows(self, x: Tensor) -> Tensor:
        """[B, rows, N, D] -> [B * G * rows, 1, N / G, D]."""
        grouped = x.unflatten(2, (self.num_groups, -1))
        grouped = grouped.transpose(1, 2)
        rows = grouped.flatten(0, 2)
        return rows[:, None]

    def to_heads(self, x: Tensor) -> Tensor:
        """[B * G * rows, 1, N / G, D] -> [B, rows, N, D]."""
        batch = len(self.query)
        grouped = x.view(batch, self.num_groups, -1, *x.shape[2:])
        grouped = grouped.transpose(1, 2)
        return grouped.flatten(2, 3)

    def per_key(self, grad: Tensor) -> Tensor:
        """[B * G, S, D] -> [B, S, G, D] in the dtype of the queries."""
        grad = grad.unflatten(0, (-1, self.num_groups))
        grad = grad.transpose(1, 2)
        return grad.to(self.query.dtype)

    def observe(self, chunk: AttentionChunk, scores: ScoreOptions) -> None:
        """Show the logits to the observer; in a chunk, heads of a group are among the queries."""
        assert scores.observe is not None, "callers have an observer"
        batch = len(self.query)
        heads = chunk.query.shape[2]
        query = chunk.query.transpose(1, 2)
        query = query.unflatten(0, (batch, self.num_groups, -1))
        keys = chunk.key.unflatten(0, (batch, self.num_groups, -1))
        mask = chunk.mask
        assert mask is not None, "gathered keys have a mask"
        masks = mask[:, :, :1].unflatten(0, (batch, self.num_groups, -1))
        for group in range(self.num_groups):
            part = replace(
                chunk,
                query=query[:, group].flatten(0, 1),
                key=keys[:, group].flatten(0, 1),
                mask=masks[:, group].flatten(0, 1),
            )
            scores.observe(part, first_head=group * heads)
