"""The collectives at the entry and exit of a tensor-parallel region (Shoeybi et al. 2019; Korthikanti et al. 2022).

    without sequence parallelism            with sequence parallelism
    x [B, S, H], replicated                 x [B, S/tp, H], sharded along the sequence
      |  enter: identity                      |  enter: all-gather
    column-parallel, attention or MLP, row-parallel: [B, S, H] partial sums
      |  leave: all-reduce                    |  leave: reduce-scatter
    y [B, S, H], replicated                 y [B, S/tp, H], sharded along the sequence

Backward is the transpose: `enter` sums gradients, `leave` copies or gathers them. Both variants send the same bytes.

B batch   S sequence   H hidden
"""

from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from nanotrain.comm.autograd import copy_to, gather_along, reduce_from, scatter_along
from nanotrain.comm.collectives import local_slice, start_all_gather, start_all_reduce, start_reduce_scatter
from nanotrain.comm.group import Group
from nanotrain.comm.work import Work
from nanotrain.kernels.deferred_wgrad import WgradQueue
from nanotrain.kernels.fp8.layer import Fp8Options

SEQUENCE = 1  # the dim of [B, S, H] that sequence parallelism shards


@dataclass(frozen=True)
class TensorParallel:
    """The group that shards the weights of a layer."""

    group: Group  # the tp group
    sequence_parallel: bool = False  # activations between tensor-parallel regions are sharded along the sequence
    # where linear layers defer their weight gradients; None where the schedule has no W actions
    wgrad_queue: WgradQueue | None = None
    fp8: Fp8Options | None = None  # how linear layers use fp8; None: they do not

    @classmethod
    def single_rank(cls) -> "TensorParallel":
        """One rank, nothing sharded."""
        return cls(Group.single_rank("tp"))

    @cached_property
    def unsharded(self) -> "TensorParallel":
        """For a layer whose weight is not sharded: no collectives, the same wgrad queue."""
        return replace(self, group=Group.single_rank("tp"), sequence_parallel=False)

    def enter(self, x: Tensor) -> Tensor:
        """[B, S or S/tp, H] -> [B, S, H]; backward sums the gradients of all ranks, once per call."""
        return gather_along(x, self.group, dim=SEQUENCE) if self.sequence_parallel else copy_to(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """[B, S, H], partial sums -> their sum, [B, S or S/tp, H]."""
        return scatter_along(x, self.group, dim=SEQUENCE) if self.sequence_parallel else reduce_from(x, self.group)

    def local_slice(self, tensor: Tensor) -> Tensor:
        """[B, S, ...], replicated (positions, masks) -> [B, S or S/tp, ...], the tokens of this rank."""
        return local_slice(tensor, self.group, dim=SEQUENCE) if self.sequence_parallel else tensor

    def start_enter(self, x: Tensor) -> Work[Tensor]:
        """Start the forward of `enter`, without autograd."""
        return start_all_gather(x, self.group, dim=SEQUENCE) if self.sequence_parallel else Work.completed(x)

    def start_enter_backward(self, grad: Tensor) -> Work[Tensor]:
        """Start the backward of `enter`; a contiguous `grad` [B, S, H] is overwritten."""
        return (
            start_reduce_scatter(grad, self.group, dim=SEQUENCE)
            if self.sequence_parallel
            else start_all_reduce(grad, self.group)
        )
