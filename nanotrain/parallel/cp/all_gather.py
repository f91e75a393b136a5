r"""Core attention with an all-gather of keys and values over cp.

    forward     all-gather of keys and values, concatenated
    backward    reduce-scatter of their gradients

The queries of each local chunk attend to the keys up to the end of that chunk, in one call per
chunk. The two chunks of a rank together have the same number of keys on every rank:

    keys      0   1   2   3            rank 1 of 2 holds chunks 1 and 2
    first     x   \                    x all, \ causal
    second    x   x   \

Plain causal attention of a chunk is aligned to the last key (lower right): on CUDA torch's bias
type for it reaches the flash kernels, which take no dense mask. The CPU computes a tile of the keys
before the chunk and a causal one.

    B batch   S sequence   C chunk = S / (2 cp)   N query heads   G key/value heads
    D, Dv head dims
"""

import torch
from torch import Tensor

from nanotrain.attention.call import AttentionCall
from nanotrain.attention.chunks import ScoreOptions
from nanotrain.attention.sdpa import LayerKernels
from nanotrain.attention.tiles import Spans
from nanotrain.comm.autograd import gather_along
from nanotrain.comm.group import Group
from nanotrain.parallel.cp.split import join_shards, zigzag_chunks


class AllGatherAttention:
    """Causal attention of local queries to all-gathered keys and values."""

    def __init__(self, group: Group, kernels: LayerKernels | None = None) -> None:
        self.group = group
        self.kernels = kernels or LayerKernels()
        self.chunks = zigzag_chunks(group.index, group.size)

    def plan_mask(
        self, segment_ids: Tensor | None, *, tokens: Tensor, window: int | None = None
    ) -> tuple[AttentionCall, ...]:
        """One `AttentionCall` per local chunk (of two); arguments as `CoreAttention.plan_mask`."""
        size = tokens.shape[1] // 2
        spans = Spans.of(segment_ids, length=2 * self.group.size * size, window=window)
        kernel = self.kernels.of(window)
        calls = []
        for chunk in self.chunks:
            queries = range(chunk * size, (chunk + 1) * size)
            calls.append(AttentionCall(kernel, spans, queries, tokens.device))
        return tuple(calls)

    def __call__(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        mask: tuple[AttentionCall, ...],
        scores: ScoreOptions | None,
    ) -> Tensor:
        """All-gather keys and values [B, S / cp, G, D], then attend with each local chunk."""
        local = torch.cat((key, value), dim=-1)
        gathered = join_shards(gather_along(local[None], self.group, dim=0))
        head_dims = (key.shape[-1], value.shape[-1])
        outputs = []
        for queries, call in zip(query.chunk(2, dim=1), mask, strict=True):
            attended = gathered[:, : len(call.keys)]
            keys, values = attended.split(head_dims, dim=-1)
            outputs.append(call(queries, key=keys, value=values, scores=scores))
        return torch.cat(outputs, dim=1)
