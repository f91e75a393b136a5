r"""Core attention with an all-gather of keys and values over cp.

    forward     all-gather of keys and values, concatenated            backward    reduce-scatter of their gradients

The queries of each local chunk attend to the keys up to the end of that chunk, in one SDPA call per chunk. The two
chunks of a rank together have the same number of keys on every rank:

    keys      0   1   2   3            rank 1 of 2 holds chunks 1 and 2
    first     x   \                    x all, \ causal
    second    x   x   \

Plain causal attention of a chunk is aligned to the last key (lower right). On CUDA it needs no mask: torch's bias type
for it reaches the flash kernels, which take no dense mask. The CPU has a mask.

    B batch   S sequence   C chunk = S / (2 cp)   N query heads   G key/value heads   D, Dv head dims
"""

import torch
from torch import Tensor

from nanotrain.comm.autograd import gather_along
from nanotrain.comm.eager import eager
from nanotrain.comm.group import Group
from nanotrain.parallel.cp.max_logits import LogitObserver
from nanotrain.parallel.cp.scores import ScoreOptions
from nanotrain.parallel.cp.sdpa import attend, attend_with, causal_mask, chunk_of
from nanotrain.parallel.cp.split import join_shards, zigzag_chunks

# [B or 1, 1, C, keys up to the end of the chunk] bool, per local chunk; None for causal where flash kernels take that
ChunkMasks = tuple[Tensor | None, ...]


class AllGatherAttention:
    """Causal attention of local queries to all-gathered keys and values."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.chunks = zigzag_chunks(group.index, group.size)

    def plan_mask(self, segment_ids: Tensor | None, *, tokens: Tensor, window: int | None = None) -> ChunkMasks:
        """The rows of the full mask that belong to the local queries."""
        size = tokens.shape[1] // 2
        if segment_ids is None and window is None and tokens.is_cuda:
            return (None, None)
        positions = torch.arange(2 * self.group.size * size, device=tokens.device)
        rows = [positions[chunk * size : (chunk + 1) * size] for chunk in self.chunks]
        return tuple(
            causal_mask(segment_ids, queries=queries, keys=positions[: (chunk + 1) * size], window=window)
            for queries, chunk in zip(rows, self.chunks, strict=True)
        )

    def __call__(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        mask: ChunkMasks,
        observe: LogitObserver | None = None,
        scores: ScoreOptions | None = None,
    ) -> Tensor:
        """All-gather, then attend chunk by chunk."""
        local = torch.cat((key, value), dim=-1)
        gathered = join_shards(gather_along(local[None], self.group, dim=0))
        size = query.shape[1] // 2
        outputs = []
        for queries, chunk, chunk_mask in zip(query.chunk(2, dim=1), self.chunks, mask, strict=True):
            keys, values = gathered[:, : (chunk + 1) * size].split((key.shape[-1], value.shape[-1]), dim=-1)
            if scores is None and observe is None and chunk_mask is None:
                outputs.append(_attend_causal(queries, key=keys, value=values))
                continue
            if chunk_mask is None:
                positions = torch.arange(keys.shape[1], device=keys.device)
                chunk_mask = causal_mask(None, queries=positions[-size:], keys=positions, window=None)
            if scores is None:
                outputs.append(attend(queries, key=keys, value=values, mask=chunk_mask, observe=observe))
                continue
            part = chunk_of(queries, key=keys, value=values, mask=chunk_mask)
            if observe is not None:
                observe(part)
            outputs.append(attend_with(scores, part, first_query=chunk * size))
        return torch.cat(outputs, dim=1)


@eager  # torch.compile cannot trace torch's bias type
def _attend_causal(query: Tensor, *, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention aligned to the last key, without a dense mask."""
    from torch.nn.attention.bias import causal_lower_right  # imports the compiler, which takes seconds

    return attend(query, key=key, value=value, mask=causal_lower_right(query.shape[1], key.shape[1]))
