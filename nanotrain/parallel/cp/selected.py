"""Core attention to the keys that an indexer selects over cp.

    forward     all-gather of keys, values and index keys, concatenated
    backward    reduce-scatter of their gradients

Where the selected keys of latent attention are gathered (attention/latent.py) the keys and values
are the compressed ones of all heads; else they are those of each head, and other keys are masked
(attention/sparse.py, attention/block_sparse.py).

An index score needs the key of every earlier token, so neither a ring nor an all-to-all of heads
serves here; every local chunk of queries is a separate call, as in all_gather.py.

    B batch   S sequence   N heads   D, Dv head dims   C + R compressed key and value
"""

from collections.abc import Callable
from typing import Protocol, Self

import torch
from torch import Tensor

from nanotrain.attention.call import AttentionCall, TileKernel
from nanotrain.attention.chunks import ScoreOptions
from nanotrain.attention.latent import attend_gathered
from nanotrain.attention.selection import AnyIndex
from nanotrain.attention.sparse import attend_selected
from nanotrain.attention.tiles import Spans
from nanotrain.comm.autograd import eager, gather_along
from nanotrain.comm.group import Group
from nanotrain.parallel.cp.split import join_shards


class SelectionIndex(Protocol):
    """Projections of an indexer, at the local tokens or at full sequences."""

    @property
    def key(self) -> Tensor:
        """[B, S, E]."""

    @property
    def reads_values(self) -> bool:
        """Whether values are separate tensors, not channels of the keys."""

    def with_key(self, key: Tensor) -> Self:
        """The index with other keys."""

    def for_call(self, number: int, *, num_calls: int, num_keys: int) -> Self:
        """The index of one of several calls, each with an equal part of the queries."""


def attend_latent(
    query: Tensor,
    *,
    key: Tensor,
    value: Tensor,
    call: AttentionCall,
    index: AnyIndex,
    scores: ScoreOptions | None,
) -> Tensor:
    """Attention of a call in one of the forms of latent attention, by the keys it is given."""
    if index.up is None:
        return attend_selected(query, key=key, value=value, call=call, index=index, scores=scores)
    return attend_gathered(query, key=key, call=call, index=index, scores=scores)


class SelectedAttention:
    """Attention of local queries to the selected keys of full sequences.

    Args:
        group: ranks that share the sequences.
        attend: attention of one call.
    """

    def __init__(self, group: Group, attend: Callable[..., Tensor] = attend_latent) -> None:
        self.group = group
        self.attend = attend

    @eager  # the loss of the index is counted, and transfers stay out of compiled graphs
    def __call__(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        mask: AttentionCall | tuple[AttentionCall, ...] | None,
        scores: ScoreOptions | None,
        index: SelectionIndex,
    ) -> Tensor:
        """[B, S / cp, N, D] -> [B, S / cp, N, Dv], attention to the keys that the indexer selects.

        Args:
            query, key, value: as of `CoreAttention`.
            mask: the plan of all-gather attention, or of one rank.
            scores: as of `CoreAttention`.
            index: projections of the indexer at the local tokens. With up-projections the keys
                are compressed, [B, S / cp, 1, C + R], and their first channels are the values.
        """
        if self.group.size > 1:
            index_key = index.key[:, :, None]
            if index.reads_values:
                key, value, index_key = self._all_gather(key, value, index_key)
            else:
                key, index_key = self._all_gather(key, index_key)
            index = index.with_key(index_key[:, :, 0])
        calls = plan_calls(mask, query)
        queries = query.chunk(len(calls), dim=1)
        outputs = []
        for i, call in enumerate(calls):
            num_keys = len(call.keys)
            out = self.attend(
                queries[i],
                key=key[:, :num_keys],
                value=value[:, :num_keys],
                call=call,
                index=index.for_call(i, num_calls=len(calls), num_keys=num_keys),
                scores=scores,
            )
            outputs.append(out)
        return outputs[0] if len(calls) == 1 else torch.cat(outputs, dim=1)

    def _all_gather(self, *tensors: Tensor) -> list[Tensor]:
        """Tensors [B, S / cp, heads, width] of full sequences, in one all-gather."""
        flat = [x.flatten(2) for x in tensors]
        local = torch.cat(flat, dim=-1)
        shards = gather_along(local[None], self.group, dim=0)
        gathered = join_shards(shards)
        widths = [x.shape[-1] for x in flat]
        parts = gathered.split(widths, dim=-1)
        full = []
        for part, x in zip(parts, tensors, strict=True):
            full.append(part.unflatten(-1, x.shape[2:]))
        return full


def plan_calls(
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
