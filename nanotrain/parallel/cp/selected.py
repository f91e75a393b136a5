"""Core attention to the keys that an indexer selects (attention/sparse.py), with an all-gather over
cp.

    forward     all-gather of keys, values and index keys, concatenated
    backward    reduce-scatter of their gradients

An index score needs the key of every earlier token, so neither a ring nor an exchange of heads
serves here; every local chunk of queries is a call of its own, as in all_gather.py.

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
        """Attend; the key of the index is local as the others are.

        Args:
            query, key, value: as of `CoreAttention`.
            mask: the plan of all-gather attention, or of one rank.
            scores: as of `CoreAttention`.
            index: of the local tokens.
        """
        if self.group.size > 1:
            tensors = (key.flatten(2), value.flatten(2), index.key)
            gathered = join_shards(
                gather_along(torch.cat(tensors, dim=-1)[None], self.group, dim=0)
            )
            flat_key, flat_value, index_key = gathered.split([x.shape[-1] for x in tensors], dim=-1)
            key, value = (
                x.unflatten(-1, like.shape[2:])
                for x, like in ((flat_key, key), (flat_value, value))
            )
            index = replace(index, key=index_key)
        if mask is None:
            length = query.shape[1]
            mask = AttentionCall(
                TileKernel(), Spans.of(None, length=length), range(length), query.device
            )
        calls = mask if isinstance(mask, tuple) else (mask,)
        outputs, num_calls = [], len(calls)
        queries = (x.chunk(num_calls, dim=1) for x in (query, index.query, index.weight))
        for call, local, index_query, weight in zip(calls, *queries, strict=True):
            keys, values, index_keys = (x[:, : len(call.keys)] for x in (key, value, index.key))
            of_call = replace(index, query=index_query, key=index_keys, weight=weight)
            outputs.append(
                attend_selected(
                    local, key=keys, value=values, call=call, index=of_call, scores=scores
                )
            )
        return outputs[0] if num_calls == 1 else torch.cat(outputs, dim=1)
