"""Core attention over sequences sharded across a context-parallel group.

split.py             zigzag sharding of sequences and microbatches
sdpa.py              SDPA, for a group of one rank
tiles.py             documents and windows as tiles; tile_attention.py: attention in tiles
call.py              attention of some queries, planned once per microbatch; its kernels
scores.py            softcapping, sinks and dropout of attention scores
max_logits.py        the largest attention logit of each head
all_gather.py        all-gather of keys and values
ring.py              ring attention; chunk_attention.py: attention to one chunk of keys, log-sum-exp merge
ulysses.py           all-to-all from sequence-sharded to head-sharded tensors

CoreAttention          the protocol that the model calls
CORE_ATTENTIONS        the only list of backends, by their value of --cp-comm-type
build_core_attention   the backend of a group
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from nanotrain.attention.max_logits import LogitObserver
from nanotrain.attention.scores import ScoreOptions
from nanotrain.attention.sdpa import LayerKernels, SDPAttention
from nanotrain.comm.group import Group
from nanotrain.config.schema import check_choice
from nanotrain.parallel.cp.all_gather import AllGatherAttention
from nanotrain.parallel.cp.ring import RingAttention
from nanotrain.parallel.cp.ulysses import UlyssesAttention

__all__ = ["CORE_ATTENTIONS", "CoreAttention", "SDPAttention", "build_core_attention"]


class CoreAttention(Protocol):
    """Causal softmax attention over sequences sharded across a cp group."""

    def plan_mask(self, segment_ids: Tensor | None, *, tokens: Tensor, window: int | None = None) -> Any:
        """Prepare the attention mask, once per microbatch for all layers.

        Args:
            segment_ids: [B, S] integers of the full sequences in host memory, equal within a segment; None if
                attention crosses segments.
            tokens: [B, S / cp], the tokens of this rank.
            window: earlier keys that a query attends to; None for all of them.

        Returns:
            The `mask` argument of `__call__`, in a form private to the backend.
        """
        ...

    def __call__(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        mask: Any,
        observe: LogitObserver | None = None,
        scores: ScoreOptions | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: [B, S / cp, N, D].
            key: [B, S / cp, G, D]; N is a multiple of G.
            value: [B, S / cp, G, Dv].
            mask: the result of `plan_mask` for this microbatch.
            observe: called with all queries and keys that attend to each other, in parts; used to track logits.
            scores: softcap, sink and dropout; None if the model has none of them.

        Returns:
            [B, S / cp, N, Dv].
        """
        ...


CORE_ATTENTIONS: dict[str, Callable[[Group, LayerKernels], CoreAttention]] = {
    "allgather": AllGatherAttention,
    "p2p": RingAttention,
    "a2a": UlyssesAttention,
}


def build_core_attention(comm_type: str, group: Group, *, kernels: LayerKernels | None = None) -> CoreAttention:
    """Build the core attention of a cp group.

    Args:
        comm_type: key of CORE_ATTENTIONS; a group of one rank needs none of them.
        group: the cp group.
        kernels: of the layers; None for SDPA and tiles.

    Raises:
        ConfigError: `comm_type` is not a key of CORE_ATTENTIONS.
    """
    check_choice("cp_comm_type", comm_type, known=CORE_ATTENTIONS)
    kernels = kernels or LayerKernels()
    return SDPAttention(kernels) if group.size == 1 else CORE_ATTENTIONS[comm_type](group, kernels)
