"""Ulysses: all-to-all from sequence-sharded to head-sharded tensors, full attention, and back.

                heads 0 1 2 3                        heads 0 1 2 3
    chunks 0 3        a a a a           chunks 0 1 2 3     a a b b         rank a, rank b
    chunks 1 2        b b b b

    forward     one all-to-all of queries, keys and values, concatenated, and one of the outputs
    backward    the same two in reverse

If cp does not divide the number of key/value heads, they are repeated up to the least common
multiple.

Jacobs et al., "DeepSpeed Ulysses", section 3; here with zigzag shards.

    B batch   S sequence   L = S / cp   N query heads   G key/value heads   D, Dv head dims
"""

import math

import torch
from einops import rearrange
from torch import Tensor

from nanotrain.attention.call import AttentionCall
from nanotrain.attention.chunks import ScoreOptions
from nanotrain.attention.sdpa import LayerKernels, SDPAttention
from nanotrain.comm.all_to_all import all_to_all
from nanotrain.comm.group import Group
from nanotrain.parallel.cp.split import join_shards, stack_shards


class UlyssesAttention:
    """Attention to full sequences, with 1 / cp of the heads per rank."""

    def __init__(self, group: Group, kernels: LayerKernels | None = None) -> None:
        self.group = group
        self.sdpa = SDPAttention(kernels)

    def plan_mask(
        self, segment_ids: Tensor | None, *, tokens: Tensor, window: int | None = None
    ) -> AttentionCall | None:
        """The call over full sequences."""
        batch, local_length = tokens.shape
        full = tokens.new_empty((batch, local_length * self.group.size))
        return self.sdpa.plan_mask(segment_ids, tokens=full, window=window)

    def __call__(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        mask: AttentionCall | None,
        scores: ScoreOptions | None,
    ) -> Tensor:
        """All-to-all, attend, all-to-all."""
        cp = self.group.size
        assert query.shape[2] % cp == 0, f"cp = {cp} does not divide {query.shape[2]} query heads"
        key = repeat_heads(key, cp)
        value = repeat_heads(value, cp)
        query, key, value = self.to_head_shards([query, key, value])
        if scores is not None:
            scores = scores.for_heads(self.group.index * query.shape[2], query.shape[2])
        out = self.sdpa(query, key=key, value=value, mask=mask, scores=scores)
        return self.to_sequence_shards(out)

    def to_head_shards(self, tensors: list[Tensor]) -> list[Tensor]:
        """Each [B, L, n, d] -> [B, S, n / cp, d], in one all-to-all."""
        cp = self.group.size
        packed = torch.cat(
            [rearrange(x, "b l (cp n) d -> cp b l (n d)", cp=cp) for x in tensors], dim=-1
        )
        received = join_shards(self._all_to_all(packed))
        widths = [x.shape[2] // cp * x.shape[3] for x in tensors]
        head_shards = []
        for part, x in zip(received.split(widths, dim=-1), tensors, strict=True):
            head_shards.append(part.unflatten(-1, (-1, x.shape[3])))
        return head_shards

    def to_sequence_shards(self, out: Tensor) -> Tensor:
        """[B, S, N / cp, Dv] -> [B, L, N, Dv]."""
        shards = stack_shards(out, size=self.group.size)
        received = self._all_to_all(shards)
        return rearrange(received, "cp b l n d -> b l (cp n) d")

    def _all_to_all(self, shards: Tensor) -> Tensor:
        """[cp, ...], entry i for rank i -> [cp, ...], entry i from rank i."""
        ones = [1] * self.group.size
        return all_to_all(shards, self.group, output_splits=ones, input_splits=ones)


def repeat_heads(x: Tensor, size: int) -> Tensor:
    """Repeat heads [B, L, n, d] up to the least common multiple of n and the size of the group."""
    num_heads = x.shape[2]
    repeats = math.lcm(num_heads, size) // num_heads
    if repeats == 1:
        return x
    return x.repeat_interleave(repeats, dim=2)
