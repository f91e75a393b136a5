"""`Group`: a group spec with its process group, and `TrafficCounter`: the bytes sent over groups.

A layer, buffer or optimizer holds the `Group` that it communicates over and nothing else of the
topology. A group of one rank has no process group: the output of its collectives is their input.

Traffic is counted by the textbook formula of the executed collective in a group of d ranks:
reduce-scatter and all-gather send (d-1)/d of the full tensor, an all-reduce twice that. Groups of
one rank send nothing and are not counted, nor are Python objects.
"""

import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nanotrain.comm.heartbeat import Heartbeat
from nanotrain.comm.turns import Turns
from nanotrain.topology.groups import UNCONNECTED, GroupName, GroupSpec


class TrafficCounter:
    """Bytes and calls that this rank has sent since the last reset, per group and operation."""

    def __init__(self) -> None:
        self._bytes: Counter[tuple[str, str]] = Counter()
        self._calls: Counter[tuple[str, str]] = Counter()

    def record(self, group: str, op: str, *, num_bytes: int) -> None:
        """Count one call of an operation ("reduce_scatter") over a group, and the bytes sent."""
        self._bytes[group, op] += num_bytes
        self._calls[group, op] += 1

    def bytes(self, group: str | None = None, op: str | None = None) -> int:
        """Bytes sent over `group` by `op`; None means all.

        >>> traffic = TrafficCounter()
        >>> traffic.record("dp", "all_gather", num_bytes=96)
        >>> traffic.record("tp", "all_reduce", num_bytes=64)
        >>> traffic.bytes(), traffic.bytes("tp"), traffic.bytes(op="all_gather")
        (160, 64, 96)
        """
        return _total(self._bytes, group=group, op=op)

    def calls(self, group: str | None = None, op: str | None = None) -> int:
        """Calls of `op` over `group`; None means all."""
        return _total(self._calls, group=group, op=op)

    def reset(self) -> None:
        """Set all counts to zero."""
        self._bytes.clear()
        self._calls.clear()


def _total(counts: Counter[tuple[str, str]], *, group: str | None, op: str | None) -> int:
    """Sum the counts of a group and an operation; None stands for all."""
    return sum(
        count
        for (over, name), count in counts.items()
        if group in (None, over) and op in (None, name)
    )


def reduced_bytes(full_bytes: int, size: int) -> int:
    """Bytes one rank sends in a reduce-scatter or an all-gather of `full_bytes`.

    >>> reduced_bytes(4096, 4)
    3072
    """
    return full_bytes * (size - 1) // size


class ParentGroup(NamedTuple):
    """The group whose process group a subgroup uses (`Group.part`)."""

    size: int
    indices: Sequence[int]  # ranks of the subgroup, as indices in the parent group
    op: str  # name under which all-to-alls of the subgroup are counted


class Group:
    """A group of ranks that this rank can communicate with.

    Args:
        spec: ranks, and the index of this rank among them; the attributes `name`, `ranks`, `index`,
            `size`, `rank` and `is_first` are copied from it.
        process_group: torch's handle; None for a group of one rank and for a tree.
        levels: groups of a tree that this rank is in, from the leaves up, for a group of many ranks
            that sends only objects. The first rank of each is in the next one, so that gathering
            along it keeps the order of the ranks.
        traffic: counter of sent bytes, shared by the groups of a rank.
        coords_text: coordinates of this rank for error messages ("pp1 dp3 tp0").
        heartbeat: record of what this rank does, shared by the groups of a rank.
    """

    def __init__(
        self,
        spec: GroupSpec,
        process_group: dist.ProcessGroup | None = None,
        *,
        levels: Sequence["Group"] = (),
        traffic: TrafficCounter | None = None,
        coords_text: str = "",
        heartbeat: Heartbeat | None = None,
    ) -> None:
        is_connected = process_group is not None or spec.size == 1 or bool(levels)
        assert is_connected or spec.name in UNCONNECTED, (
            "collectives of several ranks need a process group"
        )
        self.spec = spec
        self.process_group = process_group
        self.coords_text = coords_text
        # whether gloo carries its collectives; False for a group of one rank
        self.is_gloo = process_group is not None and dist.get_backend(process_group) == "gloo"
        self.name = spec.name
        self.ranks = spec.ranks
        self.index = spec.index
        self.size = spec.size
        self.rank = spec.rank
        self.is_first = spec.is_first
        self.traffic = traffic or TrafficCounter()
        self.heartbeat = heartbeat or Heartbeat()
        # a wait for tokens of this group lets the other computation of this rank run
        self.turns = Turns()
        self.levels = tuple(levels)
        self.parent: ParentGroup | None = None  # see `part`
        self._message_timeout: tuple[timedelta, ...] = ()
        # An empty tensor that stands for this group in compiled graphs, which hold no objects. Its
        # storage refers to the group, weakly, because autograd may save another tensor of it.
        self.handle = torch.empty(0)
        self.handle.untyped_storage().group = weakref.ref(self)  # type: ignore[attr-defined]

    @classmethod
    def from_handle(cls, handle: Tensor) -> "Group":
        """The group that a handle stands for."""
        group: Group | None = handle.untyped_storage().group()  # type: ignore[attr-defined]
        assert group is not None, "a graph outlived its process groups"
        return group

    @classmethod
    def single_rank(cls, name: GroupName, rank: int = 0) -> "Group":
        """A group of one rank, with its own traffic counter."""
        return cls(GroupSpec.single_rank(name, rank))

    def __repr__(self) -> str:
        return f"Group({self.spec})"

    def part(self, indices: Sequence[int], name: str) -> "Group":
        """A subgroup for all-to-alls; every rank of this group calls with its own subgroup.

        A subgroup has no process group of its own: ranks outside of it send and receive nothing.
        Its traffic is counted as `name`.
        """
        spec = GroupSpec(
            self.name, tuple(self.ranks[index] for index in indices), indices.index(self.index)
        )
        common: Any = {
            "traffic": self.traffic,
            "coords_text": self.coords_text,
            "heartbeat": self.heartbeat,
        }
        group = Group(spec, self.process_group, **common)
        group.parent = ParentGroup(self.size, indices, op=name)
        group.turns = self.turns
        return group

    def all_splits(self, splits: Sequence[int]) -> list[int]:
        """Split sizes of the process group, from split sizes of this group."""
        if self.parent is None:
            return list(splits)
        sizes = dict(zip(self.parent.indices, splits, strict=True))
        return [sizes.get(index, 0) for index in range(self.parent.size)]

    def once(self, tensor: Tensor) -> Tensor:
        """A tensor that is equal on all ranks, so that a sum counts it once.

        It is the tensor on the first rank of the group and zero on the others.
        """
        return tensor if self.is_first else torch.zeros_like(tensor)

    def record(self, op: str, *, num_bytes: int) -> None:
        """Count and record that a collective of this rank begins, with the bytes that it sends."""
        self.traffic.record(self.name, op, num_bytes=num_bytes)
        self.heartbeat.started(self.name, op, num_bytes=num_bytes)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long operations that start from now on wait for a slow or lost rank."""
        for level in self.levels:
            level.set_timeout(timeout)
        if self.process_group is None:
            return
        _set_timeout(self.process_group, timeout)
        if self.is_gloo:
            self._message_timeout = (timeout,)

    def wait(self, handle: dist.Work) -> None:
        """Wait for one of torch's handles of this group.

        gloo's messages keep the timeout that the process group was created with, so it is passed
        (measured, torch 2.13). NCCL's handles get none: they would block the host.
        """
        handle.wait(*self._message_timeout)

    def release(self) -> None:
        """Drop the reference to the process group, at the end of the job."""
        self.process_group, self.levels = None, ()


def _set_timeout(process_group: dist.ProcessGroup, timeout: timedelta) -> None:
    if hasattr(process_group, "set_timeout"):
        process_group.set_timeout(timeout)
    else:  # torch 2.10
        dist.distributed_c10d._set_pg_timeout(timeout, process_group)
