"""This rank's device and groups.

    ParallelContext.start     from torchrun's environment; without it, one rank and no process group
    ParallelContext.attach    on a default process group that exists already (tests, notebooks)
    ParallelContext.rejoin    leave all groups and form those of another topology
    Launch                    torchrun's environment variables; their only reader

Groups with the same ranks share one process group, whatever their names; groups of one rank have
none. A gloo group has 3 threads and 5 file descriptors, an NCCL group buffers of its own, so
sharing them matters.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store

from nanotrain.comm import flight_recorder
from nanotrain.comm.device import pick_device, process_group_device
from nanotrain.comm.generations import Generation
from nanotrain.comm.group import Group, TrafficCounter
from nanotrain.comm.heartbeat import Heartbeat
from nanotrain.comm.meeting import require_host
from nanotrain.comm.process_groups import (
    create_control,
    create_groups,
    join_world,
    rejoin_world,
)
from nanotrain.errors import EnvironmentFault
from nanotrain.quantities import count_of
from nanotrain.system import keep_freed_memory
from nanotrain.topology.groups import GroupName, GroupSpec
from nanotrain.topology.topology import Topology
from nanotrain.untrusted import shown

_START = "start with torchrun, or unset RANK, WORLD_SIZE and LOCAL_RANK for one process"


@dataclass(frozen=True)
class Launch:
    """The rank, local rank and world size that torchrun assigned to this process."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    is_distributed: bool = False
    local_world_size: int = 1  # ranks of this machine
    num_left_before: int = 0  # ranks before this one that have left the run

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Launch":
        """Read torchrun's variables; without them, a world of one rank.

        >>> address = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
        >>> launch = Launch.of({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", **address})
        >>> launch == Launch(3, 1, 4, is_distributed=True, local_world_size=1)
        True

        Raises:
            EnvironmentFault: only some of the five are set, one has no such value, or they
                contradict each other.
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        given = [name for name in names if name in environment]
        if not given:
            return cls()
        missing = [
            name for name in (*names, "MASTER_ADDR", "MASTER_PORT") if not environment.get(name)
        ]
        if missing:
            raise EnvironmentFault(
                f"{', '.join(given)} set but not {', '.join(missing)} in the environment",
                why="a distributed run needs all of them",
                fix=_START,
            )
        _number(environment, "MASTER_PORT", at_most=65535)
        world_size = _number(environment, "WORLD_SIZE", at_least=1)
        rank = _number(environment, "RANK", at_most=world_size - 1)
        local_rank = _number(environment, "LOCAL_RANK", at_most=world_size - 1)
        num_local = _number(
            {"LOCAL_WORLD_SIZE": "1", **environment}, "LOCAL_WORLD_SIZE", at_least=1
        )
        return cls(rank, local_rank, world_size, True, num_local)

    @property
    def started_rank(self) -> int:
        """The rank with which the process was started."""
        return self.rank + self.num_left_before

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of those that are left."""
        return self.rank == 0

    @property
    def took_over(self) -> bool:
        """Whether this is the first rank because all before it have left the run."""
        return self.is_first and self.num_left_before > 0

    @property
    def is_first_local(self) -> bool:
        """Whether this is the first rank of its machine, of those that are left.

        Ranks leave runs of one machine only.
        """
        return self.local_rank == 0 or self.took_over

    def among(self, members: Sequence[int]) -> "Launch":
        """The launch of a run that some ranks have left; this rank keeps its device.

        >>> launch = Launch(2, 2, 3, True, 3).among([0, 2])
        >>> launch.rank, launch.started_rank, launch.local_rank, launch.world_size
        (1, 2, 2, 2)

        Args:
            members: the ranks that are left, ascending, with the numbers of their starts.
        """
        if len(members) == self.world_size:
            return self
        num_ranks = len(members)
        rank = members.index(self.started_rank)
        return replace(
            self,
            rank=rank,
            world_size=num_ranks,
            local_world_size=num_ranks,
            num_left_before=self.started_rank - rank,
        )


def _number(
    environment: Mapping[str, str], name: str, *, at_least: int = 0, at_most: int = 10**7
) -> int:
    """Read a whole number from a variable of the environment, and check the bounds."""
    text = environment[name]
    if re.fullmatch("[0-9]{1,8}", text) and at_least <= int(text) <= at_most:
        return int(text)
    why = f"it must be a whole number from {at_least} to {at_most}"
    raise EnvironmentFault(f"{name} is {shown(text)} in the environment", why=why, fix=_START)


class JoinedRanks(NamedTuple):
    """The groups of all ranks while a topology is replaced by another one."""

    world: Group  # for tensors
    control: Group  # for objects, over gloo


class ParallelContext:
    """This rank's device and groups; created by `start` or `attach`.

    Attributes:
        topology: the plan of all groups.
        rank: global rank.
        coords: coordinate on every axis.
        coords_text: the coordinates for messages, as "pp1 dp3 tp0"; dense axes with several ranks.
        device: device of this rank's tensors.
        groups: this rank's groups by name; no `embed` on a stage that is neither first nor last.
        control: group of all ranks over gloo, for objects and barriers on any device; a tree of
            small groups in a large world.
        traffic: counter of the bytes sent over all groups.
        heartbeat: record of what this rank does, for the watchdog.
        timeout_s: seconds that a collective waits for a slow or lost rank.
        store: the key-value store at which the ranks met.
        num_local_ranks: ranks of this machine, which share its memory.
        is_member: whether this rank is one of the topology; False once a smaller one left it out.
        generation: the life of these groups in a job that forms them anew after a fault; None where
            a fault ends the job.
    """

    def __init__(self, topology: Topology, rank: int, *, device: torch.device) -> None:
        self.rank = rank
        self.device = device
        self.traffic = TrafficCounter()
        self.heartbeat = Heartbeat()
        self.store: Store = HashStore()
        self.groups: dict[GroupName, Group] = {}
        self.timeout_s = 0.0
        self.num_local_ranks = 1
        self.generation: Generation | None = None
        self._num_topologies = 0
        self._joined: JoinedRanks | tuple[()] = ()  # of the last `rejoin`
        self._set_topology(topology)

    def _set_topology(self, topology: Topology) -> None:
        """Take the place of this rank in a topology, without groups."""
        self.topology = topology
        self.is_member = self.rank < topology.world_size
        self._num_topologies += 1
        self.coords: dict[str, int] = {}
        self.coords_text = ""
        if self.is_member:
            self.coords = topology.coords(self.rank)
            self.coords_text = topology.coords_text(self.rank)
        self._group = partial(
            Group, traffic=self.traffic, coords_text=self.coords_text, heartbeat=self.heartbeat
        )
        self.control = self._group(GroupSpec.single_rank("control", self.rank))

    def group(self, name: GroupName) -> Group:
        """This rank's group of that name ("tp", "dp_shard", ...)."""
        return self.groups[name]

    @classmethod
    @contextmanager
    def start(
        cls,
        topology: Topology,
        *,
        device: str = "auto",
        timeout_s: float = 600.0,
        generation: Generation | None = None,
    ) -> Iterator["ParallelContext"]:
        """Join the world that torchrun launched, until the end of the block.

        Process groups are destroyed when the block is left without an error.
        After an error they are not destroyed, because that waits for peers that may be inside a
        collective, on NCCL forever. The entry point ends the process at once.

        `device` is "auto", "cpu" or "cuda"; `timeout_s` is how long a collective waits for a slow
        or lost rank; the ranks of a `generation` have met already.

        Raises:
            EnvironmentFault: the environment, the world size or the devices do not fit the
                topology.
        """
        launch = Launch.of(os.environ)
        if generation is not None:
            launch = launch.among(generation.members)
        if launch.world_size != topology.world_size:
            launched = count_of(launch.world_size, "rank", verb="was")
            planned = count_of(topology.world_size, "rank")
            raise EnvironmentFault(
                f"{launched} launched for a topology of {topology.world_size}",
                why="the topology is planned for the world it runs in",
                fix=f"launch {planned}, or plan the topology for {launch.world_size}",
            )
        chosen = pick_device(device, launch.local_rank)
        if chosen.type == "cpu":
            keep_freed_memory()
        if not launch.is_distributed:
            yield cls(topology, 0, device=chosen)._with_groups(timeout_s)
            return
        require_host(os.environ["MASTER_ADDR"])
        flight_recorder.switch_on()
        join_world(
            launch.rank,
            launch.world_size,
            device=chosen,
            timeout=timedelta(seconds=timeout_s),
            store=None if generation is None else generation.store,
        )
        context = cls(topology, launch.rank, device=chosen)
        context.num_local_ranks = launch.local_world_size
        context.generation = generation
        context._with_groups(timeout_s)
        if generation is not None:
            generation.connected(lambda: context.heartbeat.read().step)
        yield context
        context._destroy()

    @classmethod
    def attach(
        cls, topology: Topology, *, timeout_s: float = 600.0, device: torch.device | None = None
    ) -> "ParallelContext":
        """The context on the default process group; without one, a world of one rank.

        `device` is by default the one whose tensors the process group communicates.
        """
        rank = 0
        if dist.is_initialized():
            rank, device = dist.get_rank(), device or process_group_device(dist.group.WORLD)
        return cls(topology, rank, device=device or torch.device("cpu"))._with_groups(timeout_s)

    def _with_groups(self, timeout_s: float) -> "ParallelContext":
        """Create the process groups of all group names and the tree of control groups."""
        self.timeout_s = timeout_s
        timeout = timedelta(seconds=timeout_s)
        specs = self.topology.group_specs(self.rank) if self.is_member else {}
        world_size = self.topology.world_size
        if world_size > 1:
            self.store = dist.distributed_c10d._get_default_store()
            if self.is_member:
                self.control = self._control_of(world_size, timeout=timeout)
        process_groups = create_groups(self.topology, self.rank, timeout=timeout)
        self.groups = {
            name: self._group(spec, process_groups.get(spec.ranks)) for name, spec in specs.items()
        }
        return self

    def _control_of(self, num_ranks: int, *, timeout: timedelta) -> Group:
        """A group of the first ranks for objects: one gloo group, or a tree of them."""
        tree = []  # this rank's groups, from the leaves up
        for ranks, process_group in create_control(self.rank, num_ranks, timeout=timeout):
            spec = GroupSpec("control", ranks, ranks.index(self.rank))
            tree.append(self._group(spec, process_group))
        if tree[0].size == num_ranks:
            return tree[0]
        spec = GroupSpec("control", tuple(range(num_ranks)), self.rank)
        return self._group(spec, levels=tree)

    def rejoin(self, topology: Topology) -> JoinedRanks:
        """Leave all groups and form the groups of another topology; every rank calls this.

        No collective may be under way, and nothing built on the old groups may be used afterwards.

        Args:
            topology: topology of as many ranks as there are now, or of the first of them. The other
                ranks then are no members of any of its groups.

        Returns:
            The groups of all ranks before, members or not.
        """
        num_ranks = self.topology.world_size
        timeout_s = self.timeout_s
        timeout = timedelta(seconds=timeout_s)
        self._release()
        self._set_topology(topology)
        everyone = tuple(range(num_ranks))
        joined = JoinedRanks(
            world=self._group(GroupSpec.single_rank("world", self.rank)), control=self.control
        )
        if num_ranks > 1:
            name = f"topology-{self._num_topologies}"
            rejoin_world(name, world_size=num_ranks, timeout=timeout)
            joined = JoinedRanks(
                world=self._group(GroupSpec("world", everyone, self.rank), dist.group.WORLD),
                control=self._control_of(num_ranks, timeout=timeout),
            )
        self._joined = joined
        self._with_groups(timeout_s)
        return joined

    def set_timeout(self, timeout_s: float) -> None:
        """Set the timeout of operations that start from now on; every rank calls this."""
        self.timeout_s = timeout_s
        for group in (*self.groups.values(), self.control):
            group.set_timeout(timedelta(seconds=timeout_s))

    def _destroy(self) -> None:
        """Destroy all process groups, also groups that a `Group` still refers to."""
        self._release()
        if dist.get_backend() == "nccl" and dist.get_world_size() > self.topology.world_size:
            # NCCL would wait for the ranks that have left
            dist.distributed_c10d._abort_process_group()
            return
        dist.destroy_process_group()

    def _release(self) -> None:
        """Drop all references to process groups.

        A gloo group that lives until the interpreter exits sometimes aborts the process ("terminate
        called").
        """
        for group in (*self.groups.values(), self.control, *self._joined):
            group.release()
        self._joined = ()
