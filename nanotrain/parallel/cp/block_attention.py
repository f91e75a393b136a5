r"""Core attention in fixed blocks of queries, whose results do not depend on cp, in any bit.

Each block of queries attends to all keys up to its end in one call, whose shape follows from the
model alone. A key gets gradients from every block after it; they are added in a fixed tree over the
blocks in the order of the sequence (kernels/exact_sums.py):

    queries   0   1   2   3        cp = 2: rank 0 has blocks 0 and 3, rank 1 has 1 and 2; keys and
    keys 0    x   x   x   x        values are all-gathered, their gradients of every block too,
    keys 1        x   x   x        and each rank adds those of its keys
    keys 2            x   x
    keys 3                x

Ring attention merges partial softmax results, and reduce-scatters add gradients, in an order that
follows from the number of ranks. So every `--cp-comm-type` is computed as this all-gather.

    B batch   S sequence   N query heads   G key/value heads   D, Dv head dims
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.attention.call import AttentionCall
from nanotrain.attention.chunks import ScoreOptions
from nanotrain.attention.sdpa import attend
from nanotrain.attention.tiles import Spans
from nanotrain.comm.collectives import start_all_gather
from nanotrain.comm.group import Group
from nanotrain.kernels.exact_sums import ALIGNMENT, tree_sum
from nanotrain.parallel.cp.split import join_shards, local_chunks, zigzag_chunks


class BlockAttention:
    """Causal attention of blocks of local queries to all-gathered keys and values.

    Args:
        group: the cp group.
        block_length: positions of a block; a chunk of a rank consists of blocks.
    """

    def __init__(self, group: Group, block_length: int) -> None:
        self.group = group
        self.block_length = block_length

    def plan_mask(
        self, segment_ids: Tensor | None, *, tokens: Tensor, window: int | None = None
    ) -> tuple[AttentionCall, ...]:
        """One `AttentionCall` per local block; arguments as `CoreAttention.plan_mask`."""
        spans = Spans.of(segment_ids, length=tokens.shape[1] * self.group.size, window=window)
        calls = []
        for block in self.local_blocks(tokens.shape[1]):
            calls.append(AttentionCall(HeadKernel(), spans, block, tokens.device))
        return tuple(calls)

    def local_blocks(self, local_length: int) -> list[range]:
        """The positions of the blocks of this rank, in the order of the sequence.

        Sequences that blocks do not divide, as in generation, are one block.
        """
        length = self.block_length
        if local_length % length != 0:
            return [range(local_length)]
        starts: list[int] = []
        if self.group.size == 1:
            starts.extend(range(0, local_length, length))
        else:
            size = local_length // 2
            for chunk in zigzag_chunks(self.group.index, self.group.size):
                starts.extend(range(chunk * size, (chunk + 1) * size, length))
        return [range(start, start + length) for start in starts]

    def __call__(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        mask: tuple[AttentionCall, ...] | None,
        scores: ScoreOptions | None,
    ) -> Tensor:
        """Attend with each block of queries [B, S / cp, N, D] -> [B, S / cp, N, Dv]."""
        if mask is None:
            mask = self.plan_mask(None, tokens=query[:, :, 0, 0])
        local = torch.cat((key, value), dim=-1)
        ends = [len(call.keys) for call in mask]
        spread = _Spread.apply(local, self.group, ends)
        head_dims = (key.shape[-1], value.shape[-1])
        outputs = []
        for queries, call, attended in zip(
            query.chunk(len(mask), dim=1), mask, spread, strict=True
        ):
            keys, values = attended.split(head_dims, dim=-1)
            outputs.append(call(queries, key=keys, value=values, scores=scores))
        return torch.cat(outputs, dim=1)


class HeadKernel:
    """Attention with a dense mask that passes every query head as a separate sample.

    Its bits do not depend on the number of local heads: in a tensor of several heads, that number
    would set the strides and the alignment of a head, on which the bits of products can depend.
    """

    def __call__(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        call: AttentionCall,
        scores: ScoreOptions | None,
    ) -> Tensor:
        """[B, Q, N, D] -> [B, Q, N, Dv], without score options."""
        assert scores is None, "score options have no invariant form"
        batch, _, num_heads, _ = query.shape
        mask = call.masked_tile.mask()
        if len(mask) > 1:
            mask = mask.repeat_interleave(num_heads, dim=0)
        out = attend(
            _heads_as_samples(query, num_heads),
            key=_heads_as_samples(key, num_heads),
            value=_heads_as_samples(value, num_heads),
            mask=mask,
        )
        return _Apart.apply(out).unflatten(0, (batch, num_heads)).squeeze(3).transpose(1, 2)


def _heads_as_samples(x: Tensor, num_heads: int) -> Tensor:
    """[B, S, N or G, D] -> [B * N, S, 1, D]."""
    repeats = num_heads // x.shape[2]
    heads = x.transpose(1, 2).repeat_interleave(repeats, dim=1).flatten(0, 1)
    out: Tensor = _Apart.apply(heads[:, :, None])
    return out


class _Apart(torch.autograd.Function):
    """Copy [B, S, 1, D] so that each sample begins at an aligned address; its gradient likewise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The copy of the samples."""
        return _with_samples_apart(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """A copy of the gradient with aligned samples."""
        return _with_samples_apart(grads[0])


def _with_samples_apart(x: Tensor) -> Tensor:
    """A copy of [B, ...] in which every sample starts at an aligned address."""
    size = x[0].numel()
    unit = ALIGNMENT // x.itemsize
    storage = x.new_empty((len(x), -(-size // unit) * unit))
    return storage[:, :size].unflatten(-1, x.shape[1:]).copy_(x)


class _Spread(torch.autograd.Function):
    """[B, S / cp, G, D + Dv] -> the keys and values of each block of queries, up to its end."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: Group, ends: list[int]) -> tuple[Tensor, ...]:
        """All-gather, then one copy per block."""
        ctx.group = group
        full = local
        if group.size > 1:
            full = join_shards(start_all_gather(local[None].contiguous(), group, dim=0).wait())
        ctx.length = full.shape[1]
        return tuple(full[:, :end].clone() for end in ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Add the gradients of all blocks of all ranks in the tree."""
        group = ctx.group
        padded = []
        for grad in grads:
            padded.append(F.pad(grad, (0, 0, 0, 0, 0, ctx.length - grad.shape[1])))
        if group.size == 1:
            return tree_sum(padded).to(grads[0].dtype), None, None
        gathered = start_all_gather(torch.stack(padded)[None], group, dim=0).wait()
        first, second = gathered.chunk(2, dim=1)  # the chunks of a rank, of equally many blocks
        blocks = list(first.flatten(0, 1).unbind())
        for chunk in reversed(second.unbind()):
            blocks.extend(chunk.unbind())
        total = local_chunks(tree_sum(blocks), index=group.index, size=group.size)
        return total.to(grads[0].dtype), None, None
