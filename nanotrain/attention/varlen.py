"""Attention to packed documents with `torch.nn.attention.varlen`: flash kernels over documents of
any lengths.

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
    first_keys: tuple[int, ...]  # of each sample: the first key of its first document

    def pack(self, keys: Tensor) -> Tensor:
        """[B, K, G, D] -> [all keys of the documents, G, D]."""
        if not any(self.first_keys):
            return keys.flatten(0, 1)
        return torch.cat(
            [sample[first:] for sample, first in zip(keys, self.first_keys, strict=True)]
        )


def pack_lengths(call: AttentionCall, batch_size: int) -> PackedLengths:
    """The documents of a call of full sequences or of a chunk of them; pure."""
    spans = call.spans
    starts = spans.first_keys if spans.starts is None else spans.starts
    queries, keys, first_keys = [0], [0], []
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
        # not in every version that the package runs with
        from torch.nn.attention.varlen import varlen_attn

        assert scores is None, "the table of backends sends softcap, sinks and dropout elsewhere"
        if "varlen" not in call.kernel_plans:
            packed = pack_lengths(call, query.shape[0])
            cumulative = packed.queries, packed.keys
            longest = [int(np.diff(x).max()) for x in cumulative]
            call.kernel_plans["varlen"] = (
                packed,
                [*(on_device(x, call.device) for x in cumulative), *longest],
            )
        packed, lengths = call.kernel_plans["varlen"]
        out = varlen_attn(
            query.flatten(0, 1),
            packed.pack(key),
            packed.pack(value),
            *lengths,
            window_size=(-1 if call.spans.window is None else call.spans.window, 0),
            enable_gqa=query.shape[2] != key.shape[2],
        )
        assert isinstance(out, Tensor), "no log-sum-exp is requested"
        return out.unflatten(0, query.shape[:2])
