"""Core attention to the keys that an indexer selects (attention/sparse.py) over cp.

    forward     all-gather of keys, values and index keys, concatenated
    backward    reduce-scatter of their gradients

An index score needs the key of every earlier token, so neither a ring nor an all-to-all of heads
serves here; every local chunk of queries is a separate call, as in all_gather.py.

    B batch   S sequence   L = S / cp   N heads   D, Dv head dims
"""

from dataclasses import replace

import torch
from torch import Tensor

from nanotrain.attention.call import AttentionCall, TileKernel
from nanotrain.attention.chunks import ScoreOptions
from nanotrain.attention.sparse import Index, attend_selected
from nanotrain.attention.tiles import Spans
from nanotrain.comm.autograd import eager, gather_along
from nanotrain.comm.group import Group
from nanotrain.parallel.cp.split import join_shards


class SelectedAttention:
    """Attention of local queries to the selected keys of full sequences."""

    def __init__(self, group: Group) -> None:
        self.group = group

    @eager  # the loss of the index is counted, and transfers stay out of compiled graphs
    def __call__(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        mask: AttentionCall | tuple[AttentionCall, ...] | None,
        scores: ScoreOptions | None,
        index: Index,
    ) -> Tensor:
        """[B, S / cp, N, D] -> [B, S / cp, N, Dv], attention to the keys that the indexer selects.

        Args:
            query, key, value: as of `CoreAttention`.
            mask: the plan of all-gather attention, or of one rank.
            scores: as of `CoreAttention`.
            index: projections of the indexer at the local tokens.
        """
        if self.group.size > 1:
            key, value, index = self._all_gather(key, value, index=index)
        calls = _plan_calls(mask, query)
        queries = query.chunk(len(calls), dim=1)
        index_queries = index.query.chunk(len(calls), dim=1)
        index_weights = index.weight.chunk(len(calls), dim=1)
        outputs = []
        for i, call in enumerate(calls):
            num_keys = len(call.keys)
            call_index = replace(
                index,
                query=index_queries[i],
                key=index.key[:, :num_keys],
                weight=index_weights[i],
            )
            out = attend_selected(
                queries[i],
                key=key[:, :num_keys],
                value=value[:, :num_keys],
                call=call,
                index=call_index,
                scores=scores,
            )
            outputs.append(out)
        return outputs[0] if len(calls) == 1 else torch.cat(outputs, dim=1)

    def _all_gather(
        self, key: Tensor, value: Tensor, *, index: Index
    ) -> tuple[Tensor, Tensor, Index]:
        """Keys, values and index keys of full sequences, in one all-gather."""
        tensors = (key.flatten(2), value.flatten(2), index.key)
        local = torch.cat(tensors, dim=-1)
        gathered = join_shards(gather_along(local[None], self.group, dim=0))
        widths = [x.shape[-1] for x in tensors]
        flat_key, flat_value, index_key = gathered.split(widths, dim=-1)
        full_key = flat_key.unflatten(-1, key.shape[2:])
        full_value = flat_value.unflatten(-1, value.shape[2:])
        return full_key, full_value, replace(index, key=index_key)


def _plan_calls(
    mask: AttentionCall | tuple[AttentionCall, ...] | None, query: Tensor
) -> tuple[AttentionCall, ...]:
    """The attention calls of a mask, one per local chunk; without a mask, one causal call."""
    if isinstance(mask, tuple):
        return mask
    if mask is None:
        length = query.shape[1]
        spans = Spans.of(None, length=length)
        mask = AttentionCall(TileKernel(), spans, range(length), query.device)
    return (mask,)
