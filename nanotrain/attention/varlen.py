"""Attention to packed documents with `torch.nn.attention.varlen`, of flash kernels.

    a batch of sequences     a a a b b | c d d d d       documents of sample 0 | of sample 1
    packed                   a a a b b c d d d d         cumulative lengths 0 3 5 6 10

The queries of a chunk of sequences attend to the keys of their documents up to the chunk's end;
causal attention of a document is aligned to its last key, as flash kernels have it where queries
are fewer than keys.

    B batch   N query heads   G key/value heads   Q queries   K keys   D head dim
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanotrain.attention.call import AttentionCall
from nanotrain.attention.chunks import ScoreOptions
from nanotrain.attention.tiles import on_device


@dataclass(frozen=True)
class PackedLengths:
    """The documents of a batch that have queries in a call, as cumulative lengths."""

    queries: np.ndarray  # [documents + 1] int32
    keys: np.ndarray  # [documents + 1] int32
    first_keys: tuple[int, ...]  # the first key of the first document of each sample

    def pack(self, keys: Tensor) -> Tensor:
        """[B, K, G, D] -> [all keys of the documents, G, D]."""
        if not any(self.first_keys):
            return keys.flatten(0, 1)
        pairs = zip(keys, self.first_keys, strict=True)
        return torch.cat([sample[first:] for sample, first in pairs])


@dataclass(frozen=True)
class PackedCall:
    """The lengths of a call on its device, as arguments of `varlen_attn`."""

    lengths: PackedLengths
    queries: Tensor  # [documents + 1] int32
    keys: Tensor  # [documents + 1] int32
    max_queries: int
    max_keys: int

    @classmethod
    def of(cls, call: AttentionCall, batch_size: int) -> "PackedCall":
        """The lengths of a call of some samples."""
        lengths = pack_lengths(call, batch_size)
        queries = on_device(lengths.queries, call.device)
        keys = on_device(lengths.keys, call.device)
        max_queries = int(np.diff(lengths.queries).max())
        max_keys = int(np.diff(lengths.keys).max())
        return cls(lengths, queries, keys, max_queries, max_keys)


def pack_lengths(call: AttentionCall, batch_size: int) -> PackedLengths:
    """Lengths of the documents in a batch, as varlen kernels take them: cumulative, int32.

    The queries are full sequences or one chunk of each; keys before the chunk are counted.
    """
    spans = call.spans
    starts = spans.first_keys if spans.starts is None else spans.starts
    queries = [0]
    keys = [0]
    first_keys = []
    for row in np.broadcast_to(starts, (batch_size, starts.shape[1])):
        local = row[call.queries.start : call.queries.stop]
        borders = np.flatnonzero(local[1:] != local[:-1]) + 1
        query_lengths = np.diff([0, *borders, len(local)])
        key_lengths = query_lengths.copy()
        key_lengths[0] += call.queries.start - local[0]  # keys before the chunk
        queries.extend(query_lengths.tolist())
        keys.extend(key_lengths.tolist())
        first_keys.append(int(local[0]))
    return PackedLengths(
        np.cumsum(queries, dtype=np.int32), np.cumsum(keys, dtype=np.int32), tuple(first_keys)
    )


class VarlenKernel:
    """Causal attention inside documents, and inside a window of them."""

    def __call__(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        call: AttentionCall,
        scores: ScoreOptions | None,
    ) -> Tensor:
        """Attend to packed documents."""
        # not in every version of torch that nanotrain supports
        from torch.nn.attention.varlen import varlen_attn

        assert scores is None, "the table of backends sends softcap, sinks and dropout elsewhere"
        if "varlen" not in call.kernel_plans:
            call.kernel_plans["varlen"] = PackedCall.of(call, query.shape[0])
        packed: PackedCall = call.kernel_plans["varlen"]
        window = call.spans.window
        if window is None:
            window = -1
        has_groups = query.shape[2] != key.shape[2]
        packed_query = query.flatten(0, 1)
        packed_key = packed.lengths.pack(key)
        packed_value = packed.lengths.pack(value)
        out = varlen_attn(
            packed_query,
            packed_key,
            packed_value,
            packed.queries,
            packed.keys,
            packed.max_queries,
            packed.max_keys,
            window_size=(window, 0),
            enable_gqa=has_groups,
        )
        assert isinstance(out, Tensor), "no log-sum-exp is requested"
        return out.unflatten(0, query.shape[:2])
