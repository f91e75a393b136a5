"""Gradient reduction of a bucket: groups, collectives, sum or mean.

    inside an instance     reduce-scatter over `shard`, after every microbatch or after the last
    across instances       all-reduce of the shard over `replicate`, or a reduce-scatter where optimizer state is
                           sharded across instances too; once per step

With `no_shard` the shard group is one rank, so only the all-reduce across instances communicates. With one optimizer
instance the replicate group is one rank, so only the reduce-scatter does. With several instances (HSDP) both do.
"""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from nanotrain.comm.all_to_all import start_reduce_scatter_by_all_to_all
from nanotrain.comm.collectives import start_all_reduce, start_reduce_scatter_into
from nanotrain.comm.group import Group
from nanotrain.comm.work import Work


@dataclass(frozen=True)
class ReduceGroups:
    """The two groups a gradient is summed over."""

    shard: Group  # the ranks that a bucket is sharded over
    replicate: Group  # the ranks with the same shard
    shards_across: bool = False  # optimizer state is sharded over `replicate` too

    @cached_property
    def outer(self) -> Group:
        """The ranks that a shard is sharded over: `replicate`, or this rank only."""
        return self.replicate if self.shards_across else Group.single_rank(self.replicate.name, self.replicate.rank)


@dataclass(frozen=True)
class Reduction:
    """The collectives of one buffer."""

    groups: ReduceGroups
    averages: bool = False  # divide by the number of ranks inside the collective
    scale: float = 1.0  # factor of unreduced gradients
    by_all_to_all: bool = False  # reduce-scatter as an all-to-all in the gradients' dtype and a local fp32 sum
    keeps_full: bool = False  # all-reduce whole buckets instead of reduce-scatter, so that every rank has all gradients

    def start_inside(self, full: Tensor) -> Work[Tensor]:
        """Start to sum `full` [numel] inside the instance, into this rank's slice of it."""
        if self.scale != 1.0:
            full.mul_(self.scale)
        if self.keeps_full:
            return start_all_reduce(full, self.groups.shard, op=self._op)
        return self._start_reduce_scatter(full, self.groups.shard)

    def start_across(self, shard: Tensor) -> Work[Tensor]:
        """Start to sum `shard` across instances, in place; where it is sharded across, into this rank's slice of it.

        The result is `shard`.
        """
        if self.groups.shards_across and not self.keeps_full:
            return self._start_reduce_scatter(shard, self.groups.replicate).then(lambda _: shard)
        return start_all_reduce(shard, self.groups.replicate, op=self._op)

    @property
    def _op(self) -> str:
        return "avg" if self.averages else "sum"

    def _start_reduce_scatter(self, tensor: Tensor, group: Group) -> Work[Tensor]:
        start = start_reduce_scatter_by_all_to_all if self.by_all_to_all else start_reduce_scatter_into
        return start(shard_of(tensor, group), tensor, group=group, op=self._op)


def shard_of(full: Tensor, group: Group) -> Tensor:
    """View of this rank's shard of a flat tensor: the index-th of `group.size` equal slices."""
    numel = full.numel() // group.size
    return full[group.index * numel : (group.index + 1) * numel]
