"""Two-level context parallelism: all-to-all of heads among few ranks, a ring over the others.

    cp = 4, --hierarchical-context-parallel-sizes 2 2

    ranks 0 1      all-to-all (Ulysses): the tokens of both, half of the heads each
    ranks 2 3      the same
    ranks 0 2      ring attention (p2p) of the tokens of 0 1 and of 2 3, for the first half of heads
    ranks 1 3      the same for the second half

Ranks of an all-to-all are consecutive, so on one machine where its size divides that of a machine.
The joined zigzag shards of consecutive ranks are the zigzag shard of their rank of the ring.

Source: Fang and Zhao 2024, "USP: A Unified Sequence Parallelism Approach", and Megatron-LM,
`--cp-comm-type a2a+p2p`.

    B batch   L = S / cp   N query heads   G key/value heads   D, Dv head dims
"""

from torch import Tensor

from nanotrain.attention.chunks import ScoreOptions
from nanotrain.attention.sdpa import LayerKernels
from nanotrain.attention.tiles import TilePlan
from nanotrain.comm.group import Group
from nanotrain.config.parallel import all_to_all_ranks
from nanotrain.parallel.cp.ring import RingAttention
from nanotrain.parallel.cp.ulysses import UlyssesAttention, repeat_heads

TWO_LEVEL = "a2a+p2p"


class TwoLevelAttention:
    """Ulysses inside of consecutive ranks, ring attention across.

    Args:
        group: the cp group.
        kernels: kernels of the layers, which the ring does not use.
        num_inside: ranks of an all-to-all; None for the default.
    """

    def __init__(
        self, group: Group, kernels: LayerKernels | None = None, *, num_inside: int | None = None
    ) -> None:
        inside = num_inside or all_to_all_ranks(TWO_LEVEL, group.size)
        first = group.index - group.index % inside
        self.ulysses = UlyssesAttention(group.part(range(first, first + inside), "all_to_all"))
        across = range(group.index % inside, group.size, inside)
        self.ring = RingAttention(group.part(across, "p2p"), kernels)

    def plan_mask(
        self, segment_ids: Tensor | None, *, tokens: Tensor, window: int | None = None
    ) -> tuple[TilePlan, ...]:
        """The tiles of every step of the ring, over the tokens of an all-to-all."""
        batch, local_length = tokens.shape
        joined = tokens.new_empty((batch, local_length * self.ulysses.group.size))
        return self.ring.plan_mask(segment_ids, tokens=joined, window=window)

    def __call__(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        mask: tuple[TilePlan, ...],
        scores: ScoreOptions | None,
    ) -> Tensor:
        """All-to-all, attend around the ring, all-to-all."""
        group = self.ulysses.group
        num_heads = query.shape[2]
        assert num_heads % group.size == 0, f"{group.size} ranks cannot share {num_heads} heads"
        key = repeat_heads(key, group.size)
        value = repeat_heads(value, group.size)
        query, key, value = self.ulysses.to_head_shards([query, key, value])
        if scores is not None:
            scores = scores.for_heads(group.index * query.shape[2], query.shape[2])
        out = self.ring(query, key=key, value=value, mask=mask, scores=scores)
        return self.ulysses.to_sequence_shards(out)
