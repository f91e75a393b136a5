"""Ulysses: all-to-all from sequence-sharded to head-sharded tensors, attention to full sequences,
and back.

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
        full = tokens.new_empty((len(tokens), tokens.shape[1] * self.group.size))
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
        cp, groups = self.group.size, key.shape[2]
        assert query.shape[2] % cp == 0, f"cp = {cp} does not divide {query.shape[2]} query heads"
        repeats = math.lcm(groups, cp) // groups
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=2) for x in (key, value))
        query, key, value = self.to_head_shards([query, key, value])
        if scores is not None:
            scores = scores.of_heads(self.group.index * query.shape[2], query.shape[2])
        out = self.sdpa(query, key=key, value=value, mask=mask, scores=scores)
        return self.to_sequence_shards(out)

    def to_head_shards(self, tensors: list[Tensor]) -> list[Tensor]:
        """Each [B, L, n, d] -> [B, S, n / cp, d], in one all-to-all."""
        packed = torch.cat(
            [rearrange(x, "b l (cp n) d -> b l cp (n d)", cp=self.group.size) for x in tensors],
            dim=-1,
        )
        received = join_shards(self._all_to_all(rearrange(packed, "b l cp x -> cp b l x")))
        parts = received.split(
            [x.shape[2] // self.group.size * x.shape[3] for x in tensors], dim=-1
        )
        return [
            rearrange(part, "b s (n d) -> b s n d", d=x.shape[3])
            for part, x in zip(parts, tensors, strict=True)
        ]

    def to_sequence_shards(self, out: Tensor) -> Tensor:
        """[B, S, N / cp, Dv] -> [B, L, N, Dv]."""
        received = self._all_to_all(stack_shards(out, size=self.group.size))
        return rearrange(received, "cp b l n d -> b l (cp n) d")

    def _all_to_all(self, shards: Tensor) -> Tensor:
        """[cp, ...], entry i for rank i -> [cp, ...], entry i from rank i."""
        ones = [1] * self.group.size
        return all_to_all(shards, self.group, output_splits=ones, input_splits=ones)
