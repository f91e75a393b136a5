"""Attention in tiles, each computed by `chunk_attention.py`, merged by their log-sum-exp.

    forward_tiles     the result of a call, merged into the result of other calls
    tile_gradients    the gradients of each tile; backward_tiles: their sums
    attend_tiles      a call as an operator, with a sink

The operator keeps queries, keys, values, output and log-sum-exp, and no mask.

    B batch   N query heads   G key/value heads   Q queries   K keys   D, Dv head dims
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanotrain.attention.chunk_attention import (
    AttentionResult,
    ChunkGradients,
    accumulate_dtype,
    chunk_backward,
    chunk_forward,
    merge_log_sum_exp,
)
from nanotrain.attention.max_logits import LogitObserver
from nanotrain.attention.scores import ScoreOptions, add_sink, sink_grad
from nanotrain.attention.tiles import Inputs, Tile, TilePlan
from nanotrain.comm.autograd import eager


def forward_tiles(
    plan: TilePlan,
    inputs: Inputs,
    *,
    scores: ScoreOptions | None,
    observe: LogitObserver | None = None,
    total: AttentionResult | None = None,
) -> AttentionResult:
    """Attention of the queries to all keys of the tiles, without a sink.

    Args:
        plan: of the call.
        inputs: query [B, N, Q, D], key [B, G, K, D], value [B, G, K, Dv].
        scores: options beside mask and scale.
        observe: called with every tile.
        total: the result of earlier calls, into which this one is merged in place; in the accumulation dtype.
    """
    query, _, value = inputs
    for tile in plan.tiles:
        chunk = plan.chunk(tile, inputs, scores=scores)
        if observe is not None:
            observe(chunk)
        part = chunk_forward(chunk)
        if total is None and plan.is_one_tile:
            return part
        if total is None:
            dtype = accumulate_dtype(query) if plan.has_repeated_queries else query.dtype
            batch, heads, queries, _ = query.shape
            out = query.new_empty((batch, queries, heads, value.shape[-1]), dtype=dtype)  # as the next layer reads it
            total = AttentionResult(
                out.transpose(1, 2), query.new_empty(query.shape[:3], dtype=accumulate_dtype(query))
            )
        of_tile = AttentionResult(total.out[tile.samples], total.lse[tile.samples]).queries(tile.queries)
        if tile.is_first:
            of_tile.out.copy_(part.out)
            of_tile.lse.copy_(part.lse)
        else:
            merge_log_sum_exp(of_tile, part)
    assert total is not None, "every query attends to its own key"
    return total


def tile_gradients(
    plan: TilePlan, inputs: Inputs, *, merged: AttentionResult, scores: ScoreOptions | None, grad: Tensor
) -> Iterator[tuple[Tile, ChunkGradients]]:
    """The gradients that each tile contributes.

    Args:
        plan, inputs, scores: as in the forward.
        merged: the result of the queries over all keys, with the sink.
        grad: [B, N, Q, Dv], the gradient of `merged.out`.
    """
    for tile in plan.tiles:
        of_tile = AttentionResult(merged.out[tile.samples], merged.lse[tile.samples]).queries(tile.queries)
        chunk = plan.chunk(tile, inputs, scores=scores)
        yield tile, chunk_backward(chunk, of_tile, grad=grad[tile.samples, :, tile.queries])


def backward_tiles(
    plan: TilePlan, inputs: Inputs, *, merged: AttentionResult, scores: ScoreOptions | None, grad: Tensor
) -> ChunkGradients:
    """The gradients of query [B, N, Q, D], key [B, G, K, D] and value [B, G, K, Dv]; arguments as `tile_gradients`."""
    gradients = tile_gradients(plan, inputs, merged=merged, scores=scores, grad=grad)
    if plan.is_one_tile:
        return next(gradients)[1]
    repeated = (plan.has_repeated_queries, plan.has_repeated_keys, plan.has_repeated_keys)
    dtypes = [accumulate_dtype(x) if is_repeated else x.dtype for x, is_repeated in zip(inputs, repeated, strict=True)]
    sums = ChunkGradients(*(torch.zeros_like(x, dtype=dtype) for x, dtype in zip(inputs, dtypes, strict=True)))
    for tile, part in gradients:
        sums.query[tile.samples, :, tile.queries] += part.query
        sums.key[tile.samples, :, tile.keys] += part.key
        sums.value[tile.samples, :, tile.keys] += part.value
    return sums


@eager  # an operator of its own, whose backward torch's compiler cannot trace
def attend_tiles(
    query: Tensor,
    *,
    key: Tensor,
    value: Tensor,
    plan: TilePlan,
    scores: ScoreOptions | None = None,
) -> Tensor:
    """Softmax attention: query [B, Q, N, D], key [B, K, G, D], value [B, K, G, Dv] -> [B, Q, N, Dv]."""
    inputs = [x.transpose(1, 2) for x in (query, key, value)]
    sink = None if scores is None else scores.sink
    out: Tensor = _AttendTiles.apply(*inputs, sink, plan, scores)
    return out.transpose(1, 2)


class _AttendTiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, *rest: Any) -> Tensor:
        plan, scores = rest
        total = forward_tiles(plan, (query, key, value), scores=scores)
        if sink is not None:
            total = add_sink(replace(total, out=total.out.to(accumulate_dtype(query))), sink)
        out = total.out.to(query.dtype)
        ctx.plan, ctx.scores = plan, None if scores is None else replace(scores, sink=None)
        ctx.save_for_backward(query, key, value, sink, out, total.lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sink, out, lse = ctx.saved_tensors
        inputs, merged = (query, key, value), AttentionResult(out, lse)
        found = backward_tiles(ctx.plan, inputs, merged=merged, scores=ctx.scores, grad=grads[0])
        gradients = (found.query.to(query.dtype), found.key.to(key.dtype), found.value.to(value.dtype))
        return *gradients, sink_grad(sink, merged, grad=grads[0]), None, None
