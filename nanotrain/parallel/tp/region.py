"""`TensorParallel`: the group that shards weights, and the collectives at both ends of a region.

B batch   S sequence   H hidden
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from nanotrain.comm.autograd import copy_to, gather_along, reduce_from, scatter_along
from nanotrain.comm.collectives import (
    local_slice,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from nanotrain.comm.group import Group
from nanotrain.comm.work import Work
from nanotrain.kernels.deferred_wgrad import WgradQueue
from nanotrain.kernels.fp8.layer import Fp8Options

SEQUENCE = 1  # the dim of [B, S, H] that sequence parallelism shards


@dataclass(frozen=True)
class LayerFunctions:
    """Other implementations of the layers of layers.py, chosen when layers are built."""

    # the `compute` of column- or row-parallel layers, biases included
    choose_products: Callable[["TensorParallel"], Callable[..., tuple[Tensor, ...]]]
    # (tokens, weight, first): rows of a shard of the vocabulary that begins at token `first`
    look_up: Callable[..., Tensor]
    options: Any = None  # what other modules read that are replaced with them
    # functions of layers with replicated weights; None: the same
    replicated: "LayerFunctions | None" = None


@dataclass(frozen=True)
class TensorParallel:
    """The group that shards the weights of a layer."""

    group: Group  # the tp group
    # whether activations between tensor-parallel regions are sharded along the sequence
    sequence_parallel: bool = False
    # the queue of deferred weight gradients; None where the schedule has no W actions
    wgrad_queue: WgradQueue | None = None
    fp8: Fp8Options | None = None  # fp8 options of linear layers; None: no fp8
    # whether layers are row-parallel: they reduce their output, others gather their input
    is_row: bool = False
    # implementation of products that overlap with the transfers of sequence parallelism, a key of
    # overlap.py's OVERLAPS; empty: forward transfers are waited for
    overlap: str = ""
    # the same of products in fp8, whose forward alone overlaps
    fp8_overlap: str = ""
    functions: LayerFunctions | None = None  # None: the functions of layers.py

    @classmethod
    def single_rank(cls) -> "TensorParallel":
        """One rank, nothing sharded."""
        return cls(Group.single_rank("tp"))

    @cached_property
    def unsharded(self) -> "TensorParallel":
        """The variant for a replicated weight: no collectives, the same wgrad queue."""
        functions = self.functions
        if functions is not None:
            functions = functions.replicated or functions
        return replace(
            self,
            group=Group.single_rank("tp"),
            sequence_parallel=False,
            overlap="",
            fp8_overlap="",
            functions=functions,
        )

    @property
    def is_plain(self) -> bool:
        """Whether layers neither communicate nor defer weight gradients nor use fp8."""
        return self.group.size == 1 and self.wgrad_queue is None and self.fp8 is None

    @property
    def gathers_input(self) -> bool:
        """Whether layers communicate before their products."""
        return self.group.size > 1 and not self.is_row

    def enter(self, x: Tensor) -> Tensor:
        """[B, S or S/tp, H] -> [B, S, H]; each call's backward sums the gradients of all ranks."""
        if self.sequence_parallel:
            return gather_along(x, self.group, dim=SEQUENCE)
        return copy_to(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """[B, S, H], partial sums -> their sum, [B, S or S/tp, H]."""
        if self.sequence_parallel:
            return scatter_along(x, self.group, dim=SEQUENCE)
        return reduce_from(x, self.group)

    def local_slice(self, tensor: Tensor) -> Tensor:
        """[B, S, ...], replicated (positions, masks) -> [B, S or S/tp, ...], this rank's tokens."""
        if self.sequence_parallel:
            return local_slice(tensor, self.group, dim=SEQUENCE)
        return tensor

    def start_enter(self, x: Tensor) -> Work[Tensor]:
        """Start the forward of `enter`, which is the backward of `leave`."""
        if self.sequence_parallel:
            return start_all_gather(x, self.group, dim=SEQUENCE)
        return Work.completed(x)

    def start_leave(self, partial_sum: Tensor) -> Work[Tensor]:
        """Start the forward of `leave`, which is the backward of `enter`.

        A contiguous tensor [B, S, H] is overwritten.
        """
        if self.sequence_parallel:
            return start_reduce_scatter(partial_sum, self.group, dim=SEQUENCE)
        return start_all_reduce(partial_sum, self.group)
