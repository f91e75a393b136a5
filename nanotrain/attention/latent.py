"""Latent attention to selected keys (selection.py) that reads no other keys.

Every head reads the same compressed keys and values, so the keys that a query selects are gathered
once for all heads (gathered.py). The up-projection of keys is applied to the query instead, and the
one of values to the output:

    query . (key_up c)       = (key_up^T query) . c
    sum_k w_k (value_up c_k) = value_up (sum_k w_k c_k)

    query [N, Dn + R] -- key_up^T --> [N, C + R] ---+
    keys of the query: rows of [S, C + R] ----------+-- attention --> [N, C] -- value_up --> [N, Dv]

    attend_gathered    attention of the queries of a call

Per selected key this is (2 C + R) / (Dn + R + Dv) times the FLOPs of attention to the keys of all
heads, so for short sequences other keys are masked instead (sparse.py; `gathers_keys` in
spec/kinds/dsa.py). The backward computes queries and outputs in compressed channels again.

DeepSeek-V2 (2024), section 2.1.2; DeepSeek-V3.2 (2025), section 2.1.

    B batch   Q queries   S keys   K selected keys   N heads   R rotary channels
    Dn channels without position   Dv channels of a value   C width of compressed keys and values
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanotrain.attention.absorbed import UpProjection
from nanotrain.attention.call import AttentionCall
from nanotrain.attention.chunk_kernels import AttentionResult
from nanotrain.attention.chunks import ScoreOptions, accumulate_dtype
from nanotrain.attention.gathered import (
    SelectedKeys,
    add_rows,
    cap_scores_,
    part_size,
    split_rows,
    wide_product,
)
from nanotrain.attention.selection import (
    AnyIndex,
    AttachGradients,
    GatheredIndexKeys,
    Index,
    IndexKeys,
    IndexScores,
    KeptSelection,
)
from nanotrain.comm.collectives import all_reduce
from nanotrain.spec.kinds.dsa import COMPRESSED_NUMEL


def attend_gathered(
    query: Tensor,
    *,
    key: Tensor,
    call: AttentionCall,
    index: AnyIndex,
    scores: ScoreOptions | None,
) -> Tensor:
    """Softmax attention to the selected keys, with the gradients of the loss of the index.

    Args:
        query: [B, Q, N, Dn + R], N heads of this rank.
        key: [B, S, 1, C + R], compressed keys and values, then rotary channels.
        call: the queries, and the keys that they may attend to.
        index: index of these queries and keys, with the up-projections of the heads.
        scores: options besides mask and scale; None for none.

    Returns:
        [B, Q, N, Dv].
    """
    options = scores or ScoreOptions()
    key = key[:, :, 0]
    forward = _Forward(query, key, call=call, index=index, options=options)
    forward.run()
    index.keep(forward.positions)
    if not torch.is_grad_enabled():
        return forward.out
    options = replace(options, observe=None)
    saved = (forward.out, forward.lse, forward.positions)
    up = forward.up
    rest = (up.key_dim, call.queries.start, options)
    out = _AttendGathered.apply(query, key, up.weight, *saved, *rest)
    if forward.gradients is None:
        selected: Tensor = out
        return selected
    gradients = forward.gradients.finish()
    attached: Tensor = AttachGradients.apply(out, *index.tensors, *gradients)
    return attached


class _Forward:
    """The results of a call, filled by `run`."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        *,
        call: AttentionCall,
        index: AnyIndex,
        options: ScoreOptions,
    ) -> None:
        assert index.up is not None, "gathered keys are compressed"
        batch, num_queries, num_heads, head_dim = query.shape
        rows = (batch, num_queries, num_heads)
        num_keys = min(index.topk, len(call.keys))
        selected = (batch, num_queries, num_keys)
        dtype = accumulate_dtype(query)
        self.query = query
        self.key = key
        self.up = index.up
        self.call = call
        self.index = index
        self.options = options
        self.scale = head_dim**-0.5
        self.out = query.new_empty((*rows, self.up.value_dim))
        self.lse = query.new_empty(rows, dtype=dtype)
        self.positions = query.new_full(selected, -1, dtype=torch.int32)
        self.gradients = index.gradients()

    @torch.no_grad()
    def run(self) -> None:
        """Select and attend, some queries at a time."""
        num_heads = self.query.shape[2]
        num_keys = self.positions.shape[-1]
        widest = max(self.key.shape[-1], self.index.key.shape[-1])
        gathered = num_keys * widest
        size = part_size(self.key, gathered)
        for rows in self.index.blocks(self.call, num_heads=num_heads, size=size):
            self._run_rows(rows)

    def _run_rows(self, rows: slice) -> None:
        if isinstance(self.index, KeptSelection):
            selected = SelectedKeys(self.index.positions, self.call.queries.start).rows(rows)
            self._attend(self.up.absorb(self.query[:, rows]), selected, rows=rows)
        else:
            self._run_indexed_rows(self.index, rows)

    def _run_indexed_rows(self, index: Index, rows: slice) -> None:
        """Some queries, whose keys this layer selects."""
        first = self.call.queries.start + rows.start
        num_keys = self.call.queries.start + rows.stop
        may_attend = self._may_attend(rows, num_keys)
        scores = _index_scores(index, rows, num_keys=num_keys)
        mask = may_attend
        if scores is not None:
            mask = scores.select(may_attend, topk=index.topk)
        selected = SelectedKeys.of(mask, topk=index.topk, first_query=first)
        absorbed = self.up.absorb(self.query[:, rows])
        weights = self._attend(absorbed, selected, rows=rows)
        loss = index.loss
        if loss is None:
            return
        keys = IndexKeys(index.key[:, :num_keys])
        mean = weights
        if loss.is_sparse:
            keys = GatheredIndexKeys.of(index.key, selected.clamped)
            scores = index.scores(rows, keys.keys)
            mask = selected.mask
        else:
            mean = self._weights_of_all_keys(absorbed, may_attend)
            mask = may_attend
        target = mean.mean(2)
        all_reduce(target, loss.tp)
        target /= loss.tp.size
        assert scores is not None, "the loss reads the scores of its keys"
        assert self.gradients is not None, "an index has gradients"
        self.gradients.add(rows, scores=scores, mask=mask, target=target, keys=keys)

    def _may_attend(self, rows: slice, num_keys: int) -> Tensor:
        """[B, rows, keys] bool."""
        allowed = self.call.masked_tile
        tile = replace(allowed.tiles[0], queries=rows, keys=slice(0, num_keys))
        mask = allowed.mask(tile)
        return mask[:, 0].expand(len(self.query), -1, -1)

    def _attend(self, absorbed: Tensor, selected: SelectedKeys, *, rows: slice) -> Tensor:
        """Fill the results of some queries; returns their weights [B, rows, N, K]."""
        size = absorbed.shape[:2]
        channels = self.up.weight.shape[1]
        gathered = selected.gather(
            absorbed, self.key, value_dim=channels, scale=self.scale, scores=self.options
        )
        result = gathered.forward()
        num_keys = selected.positions.shape[-1]
        self.positions[:, rows, :num_keys] = selected.positions
        self.out[:, rows] = self.up.expand(result.out.unflatten(0, size))
        self.lse[:, rows] = result.lse.unflatten(0, size)
        return result.weights.unflatten(0, size)

    def _weights_of_all_keys(self, absorbed: Tensor, may_attend: Tensor) -> Tensor:
        """[B, rows, N, keys], the weights of attention to all keys."""
        num_heads = absorbed.shape[2]
        num_keys = may_attend.shape[-1]
        keys = self.key[:, :num_keys]
        products = wide_product(absorbed.flatten(1, 2), keys.mT)
        products.mul_(self.scale)
        scores = products.unflatten(1, (-1, num_heads))
        cap_scores_(scores, self.options.softcap)
        scores.masked_fill_(~may_attend[:, :, None], -torch.inf)
        return scores.softmax(-1)


def _index_scores(index: Index, rows: slice, *, num_keys: int) -> IndexScores | None:
    """The scores of all keys; None where neither the selection nor the loss reads them."""
    if num_keys <= index.topk and not index.has_loss_over_all:
        return None
    return index.scores(rows, index.key[:, :num_keys])


class _AttendGathered(torch.autograd.Function):
    """Attention to selected keys, whose results are known.

    Queries [B, Q, N, Dn + R], keys [B, S, C + R], weight of the up-projections, out, log-sum-exp
    and positions of the keys, Dn, position of the first query and score options -> out.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, weight: Tensor, out: Tensor, *rest: Any
    ) -> Tensor:
        lse, positions, *ctx.rest = rest
        ctx.save_for_backward(query, key, weight, out, lse, positions)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, weight, out, lse, positions = ctx.saved_tensors
        key_dim, first_query, options = ctx.rest
        up = UpProjection(weight, key_dim, out.shape[-1])
        selected = SelectedKeys(positions, first_query)
        backward = _Backward(query, key, up=up, selected=selected, options=options)
        numel = query.shape[0] * query.shape[2] * key.shape[-1]
        for rows in split_rows(query.shape[1], COMPRESSED_NUMEL // numel):
            result = AttentionResult(out[:, rows], lse[:, rows])
            backward.add(rows, result, grad=grads[0][:, rows])
        return *backward.gradients(), *(None for _ in range(6))


class _Backward:
    """Gradients of a call, summed over blocks of queries."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        *,
        up: UpProjection,
        selected: SelectedKeys,
        options: ScoreOptions,
    ) -> None:
        dtype = accumulate_dtype(query)
        self.query = query
        self.key = key
        self.up = up
        self.selected = selected
        self.options = options
        self.query_grad = torch.empty_like(query)
        self.key_grad = torch.zeros_like(key, dtype=dtype)
        self.key_up_grad = torch.zeros_like(up.key, dtype=dtype)
        self.value_up_grad = torch.zeros_like(up.value, dtype=dtype)

    def add(self, rows: slice, result: AttentionResult, *, grad: Tensor) -> None:
        """Add the gradients of some queries.

        Args:
            rows: the queries.
            result: their `out` [B, rows, N, Dv] and `lse` [B, rows, N].
            grad: [B, rows, N, Dv], the gradient of `out`.
        """
        up = self.up
        query = self.query[:, rows]
        absorbed = up.absorb(query)
        dtype = self.key_grad.dtype
        compressed_grad = torch.einsum("bqnd,ndc->bqnc", grad, up.value)
        # the sum over channels of output times gradient is the same before and after expansion
        products = grad.to(dtype) * result.out.to(dtype)
        result = AttentionResult(products.sum(-1), result.lse)
        absorbed_grad, compressed = self._add_keys(
            absorbed, self.selected.rows(rows), sums=result, grad=compressed_grad
        )
        channels = compressed.shape[-1]
        nope = query[..., : up.key_dim]
        nope_grad = absorbed_grad[..., :channels]
        rope_grad = absorbed_grad[..., channels:]
        query_grad = self.query_grad[:, rows]
        query_grad[..., : up.key_dim] = torch.einsum("bqnc,ndc->bqnd", nope_grad, up.key)
        query_grad[..., up.key_dim :] = rope_grad
        self.key_up_grad += torch.einsum("bqnd,bqnc->ndc", nope, nope_grad)
        self.value_up_grad += torch.einsum("bqnd,bqnc->ndc", grad, compressed)

    def _add_keys(
        self, absorbed: Tensor, selected: SelectedKeys, *, sums: AttentionResult, grad: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Add the gradients of keys; returns the gradient of the queries, and the output.

        Args:
            absorbed: [B, rows, N, C + R], queries.
            selected: their keys.
            sums: the sums over channels of output times gradient, and the log-sum-exp.
            grad: [B, rows, N, C], the gradient of the output.
        """
        absorbed_grad = torch.empty_like(absorbed)
        compressed = torch.empty_like(grad)
        num_keys = selected.positions.shape[-1]
        num_rows = grad.shape[1]
        scale = self.query.shape[-1] ** -0.5
        channels = grad.shape[-1]
        size = part_size(self.key, num_keys * self.key.shape[-1])
        for part in split_rows(num_rows, size):
            keys = selected.rows(part)
            query = absorbed[:, part]
            gathered = keys.gather(
                query, self.key, value_dim=channels, scale=scale, scores=self.options
            )
            found = gathered.backward(
                lse=sums.lse[:, part].flatten(0, 1),
                sums=sums.out[:, part].flatten(0, 1),
                grad=grad[:, part].flatten(0, 1),
            )
            shape = query.shape[:2]
            absorbed_grad[:, part] = found.query.unflatten(0, shape)
            compressed[:, part] = found.out.unflatten(0, shape)
            add_rows(self.key_grad, keys.clamped, values=found.keys)
        return absorbed_grad, compressed

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and the weight of the up-projections."""
        per_head = torch.cat((self.key_up_grad, self.value_up_grad), dim=1)
        up_grad = per_head.flatten(0, 1).to(self.up.weight.dtype)
        key_grad = self.key_grad.to(self.key.dtype)
        return self.query_grad, key_grad, up_grad
