"""The cores of attention: from the queries, keys and values of this rank to what its queries attend to.

    split.py        which positions a rank holds (zigzag), and the batch cut that way
    plain.py        the core of a group of one
    all_gather.py   keys and values are gathered
    ring.py         keys and values are passed around; blocks.py attends to what has arrived
    heads.py        a rank trades its part of the sequence for a part of the heads

    Core              what the model calls
    ATTENTION_CORES   by the value of --cp-comm-type
    build_core        the one a group gets

The model knows nothing of cp beyond the core it was built with.
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from nanotrain.comm.group import Group
from nanotrain.parallel.cp.all_gather import AllGatherAttention
from nanotrain.parallel.cp.ring import RingAttention
from nanotrain.parallel.cp.sdpa import SDPAttention
from nanotrain.parallel.cp.ulysses import UlyssesAttention

__all__ = ["CORE_ATTENTIONS", "CoreAttention", "SDPAttention", "build_core_attention"]


class CoreAttention(Protocol):
    """Causal attention over sequences that the ranks of a cp group share."""

    def plan_mask(self, segment_ids: Tensor | None, *, tokens: Tensor) -> Any:
        """What all layers need to know of the batch's borders; made once per batch and meant for this core only.

        Args:
            document_ids: [B, S] of the whole sequence, equal within a document; None where attention crosses documents.
            tokens: [B, S / cp], the ones this rank holds.
        """
        ...

    def __call__(self, query: Tensor, *, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        """Attend.

        Args:
            query: [B, S / cp, N, D].
            key: [B, S / cp, G, D]; N is a multiple of G.
            value: [B, S / cp, G, Dv].
            mask: what `plan_mask` made for this batch.

        Returns:
            [B, S / cp, N, Dv].
        """
        ...


CORE_ATTENTIONS: dict[str, Callable[[Group], CoreAttention]] = {
    "allgather": AllGatherAttention,
    "p2p": RingAttention,
    "a2a": UlyssesAttention,
}


def build_core_attention(comm_type: str, group: Group) -> CoreAttention:
    """The core for a cp group.

    Args:
        comm_type: a key of ATTENTION_CORES.
        group: cp; a group of one gets the plain core.
    """
    return SDPAttention() if group.size == 1 else CORE_ATTENTIONS[comm_type](group)
