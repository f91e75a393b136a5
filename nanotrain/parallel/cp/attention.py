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
from nanotrain.parallel.cp.all_gather import AllGatherCore
from nanotrain.parallel.cp.heads import HeadsCore
from nanotrain.parallel.cp.plain import PlainCore
from nanotrain.parallel.cp.ring import RingCore

__all__ = ["ATTENTION_CORES", "Core", "PlainCore", "build_core"]


class Core(Protocol):
    """Causal attention over sequences that the ranks of a cp group share."""

    def plan_mask(self, document_ids: Tensor | None, *, tokens: Tensor) -> Any:
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


ATTENTION_CORES: dict[str, Callable[[Group], Core]] = {"allgather": AllGatherCore, "p2p": RingCore, "a2a": HeadsCore}


def build_core(comm_type: str, group: Group) -> Core:
    """The core for a cp group.

    Args:
        comm_type: a key of ATTENTION_CORES.
        group: cp; a group of one gets the plain core.
    """
    return PlainCore() if group.size == 1 else ATTENTION_CORES[comm_type](group)
