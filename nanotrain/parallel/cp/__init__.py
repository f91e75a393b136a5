"""Context parallelism: sequences sharded over the cp group, and core attentions for such shards.

    split.py              zigzag sharding of sequences and microbatches
    all_gather.py         all-gather of keys and values
    ring.py               ring attention
    ulysses.py            all-to-all from sequence-sharded to head-sharded tensors
    two_level.py          all-to-all inside of consecutive ranks, a ring across
    selected.py           attention to the keys that an indexer selects
    linear_attention.py   linear attention: states passed between ranks, or Ulysses
    chunks.py             chunks in the order of the sequence, for layers that read tokens in order

CORE_ATTENTIONS is the only list of core attentions, by their value of --cp-comm-type.
Projections, RoPE and masks are in `nanotrain.model`, tokens of a batch in `nanotrain.data`.
"""

from collections.abc import Callable

from nanotrain.attention.call import CoreAttention
from nanotrain.attention.sdpa import LayerKernels, SDPAttention
from nanotrain.comm.group import Group
from nanotrain.config.schema import check_choice
from nanotrain.parallel.cp.all_gather import AllGatherAttention
from nanotrain.parallel.cp.ring import RingAttention
from nanotrain.parallel.cp.two_level import TWO_LEVEL, TwoLevelAttention
from nanotrain.parallel.cp.ulysses import UlyssesAttention

CORE_ATTENTIONS: dict[str, Callable[[Group, LayerKernels], CoreAttention]] = {
    "allgather": AllGatherAttention,
    "p2p": RingAttention,
    "a2a": UlyssesAttention,
    TWO_LEVEL: TwoLevelAttention,
}


def build_core_attention(
    comm_type: str,
    group: Group,
    *,
    kernels: LayerKernels | None = None,
    num_inside: int | None = None,
) -> CoreAttention:
    """Build the core attention of a cp group.

    Args:
        comm_type: key of CORE_ATTENTIONS, unless the group has one rank.
        group: the cp group.
        kernels: kernels of the layers; None for SDPA and tiles.
        num_inside: ranks of an all-to-all of a2a+p2p; None for the default.

    Raises:
        ConfigError: `comm_type` is not a key of CORE_ATTENTIONS.
    """
    check_choice("cp_comm_type", comm_type, known=CORE_ATTENTIONS)
    kernels = kernels or LayerKernels()
    if group.size == 1:
        return SDPAttention(kernels)
    if comm_type == TWO_LEVEL:
        return TwoLevelAttention(group, kernels, num_inside=num_inside)
    return CORE_ATTENTIONS[comm_type](group, kernels)
