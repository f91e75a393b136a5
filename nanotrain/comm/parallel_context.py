"""The live side of the topology: this rank's device and its groups, the only place that creates them.

    ParallelContext.start     from torchrun's environment; without one, a world of one rank and no process group
    ParallelContext.attach    on a default process group that is already there (test harness, notebooks)
    ParallelContext.fake      any rank of any world, without communication (dry runs)
    Launch                    what torchrun says in the environment; the only read of it

Every distinct tuple of ranks gets one process group, whatever the number of names it serves; groups of one get none.
A gloo group has 3 threads and 5 file descriptors, an NCCL group its own buffers, so sharing them matters.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from nanotrain.comm.device import backend_of, pick_device, process_group_device
from nanotrain.comm.fake import fake_world
from nanotrain.comm.group import Group
from nanotrain.comm.scratch import Scratch
from nanotrain.comm.traffic import TrafficCounter
from nanotrain.errors import EnvironmentFault
from nanotrain.topology.topology import Topology


@dataclass(frozen=True)
class Launch:
    """Where this process stands among those that were launched together."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    is_distributed: bool = False

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Launch":
        """Read torchrun's variables; none of them means a world of one.

        >>> Launch.of({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"})
        Launch(rank=3, local_rank=1, world_size=4, is_distributed=True)

        Raises:
            EnvironmentFault: only some of RANK, WORLD_SIZE and LOCAL_RANK are set, or they make no sense.
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        given = [name for name in names if name in environment]
        if not given:
            return cls()
        missing = [name for name in names if name not in environment]
        if missing:
            raise EnvironmentFault(
                f"{', '.join(given)} set but not {', '.join(missing)} in the environment",
                why="a rank must know its number and the size of the world",
                fix="start with torchrun, or unset them all for one process",
            )
        for name in names:
            if not environment[name].isdecimal():
                raise EnvironmentFault(f"{name} is {environment[name]!r} in the environment", why="it is no number")
        rank, world_size, local_rank = (int(environment[name]) for name in names)
        if rank >= world_size:
            raise EnvironmentFault(f"RANK is {rank} in a world of {world_size}", why="ranks count from 0")
        return cls(rank, local_rank, world_size, is_distributed=True)


class ParallelContext:
    """This rank among the others; made by `start`, `attach` or `fake`.

    Attributes:
        topology: the plan of all groups.
        rank: this rank's number in the world.
        coords: its place on every axis.
        place: the same as text, dense axes longer than one only ("pp1 dp3 tp0").
        device: where its tensors live.
        groups: its group of every name; no `embed` on a stage that is neither first nor last.
        control: a gloo group of the whole world for objects and barriers, whatever the device.
        ledger: bytes sent over all of them.
    """

    def __init__(self, topology: Topology, rank: int, *, device: torch.device) -> None:
        self.topology, self.rank, self.device = topology, rank, device
        self.coords = topology.coords(rank)
        long_axes = [axis for axis in reversed(topology.dense.axes) if topology.size(axis) > 1]
        self.place = " ".join(f"{axis}{self.coords[axis]}" for axis in long_axes)
        self.traffic, self._scratch = TrafficCounter(), Scratch()
        self.groups: dict[str, Group] = {}
        self.control = self._handle("control", (rank,))

    def group(self, name: str) -> Group:
        """This rank's group of that name ("tp", "dp_shard", ...)."""
        return self.groups[name]

    @classmethod
    @contextmanager
    def start(
        cls, topology: Topology, *, device: str = "auto", timeout_s: float = 600.0
    ) -> Iterator["ParallelContext"]:
        """Take this process's place in the world; leaving the block gives all groups back.

        Args:
            topology: of the world that was launched.
            device: "auto", "cpu" or "cuda".
            timeout_s: how long any collective waits for a late or lost rank.

        Raises:
            EnvironmentFault: the environment, the world's size or the devices do not fit.
        """
        launch = Launch.of(os.environ)
        if launch.world_size != topology.world_size:
            raise EnvironmentFault(
                f"{launch.world_size} ranks were launched for a topology of {topology.world_size}",
                why="the topology is planned for the world it runs in",
                fix=f"launch {topology.world_size} ranks, or plan the topology for {launch.world_size}",
            )
        here = pick_device(device, launch.local_rank)
        if not launch.is_distributed:
            yield cls(topology, 0, device=here)._with_groups(timeout_s)
            return
        _join_world(launch, backend_of(here), timeout_s=timeout_s)
        context = cls(topology, launch.rank, device=here)
        try:
            yield context._with_groups(timeout_s)
        finally:
            context._leave()

    @classmethod
    def attach(cls, topology: Topology, *, timeout_s: float = 600.0) -> "ParallelContext":
        """The context on the default process group that this process has joined; without one, a world of one."""
        if not dist.is_initialized():
            return cls(topology, 0, device=torch.device("cpu"))._with_groups(timeout_s)
        return cls(topology, dist.get_rank(), device=process_group_device(dist.group.WORLD))._with_groups(timeout_s)

    @classmethod
    @contextmanager
    def fake(cls, topology: Topology, rank: int) -> Iterator["ParallelContext"]:
        """Play one rank of any world; collectives return at once and leave other ranks' values undefined."""
        with fake_world(rank, topology.world_size):
            yield cls(topology, rank, device=torch.device("cpu"))._with_groups(1.0)

    def _with_groups(self, timeout_s: float) -> "ParallelContext":
        """Create one process group per distinct tuple of ranks and hand it to every name it serves."""
        timeout = timedelta(seconds=timeout_s)
        everyone = self.topology.members(self.rank, "world")
        made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        if len(everyone) > 1:
            made[everyone] = dist.group.WORLD
            backend = "fake" if dist.get_backend() == "fake" else "gloo"
            apart = _new_group("control", everyone, timeout=timeout, backend=backend)
            self.control = self._handle("control", everyone, process_group=apart)
        # Every rank creates every group, its own or not, in the same order: torch numbers groups by counting, also
        # where only the members synchronize, and a rank that skipped one (embed, on a middle stage) would count wrong.
        for name, groups in self.topology.groups().items():
            for ranks in groups:
                if len(ranks) > 1 and ranks not in made:
                    made[ranks] = _new_group(name, ranks, timeout=timeout)
                if self.rank in ranks:
                    self.groups[name] = self._handle(name, ranks, process_group=made.get(ranks))
        return self

    def _leave(self) -> None:
        """Give all process groups back, whoever still holds a `Group`."""
        # A gloo group that lives until the interpreter's end aborts the process now and then ("terminate called").
        for group in (*self.groups.values(), self.control):
            group.release()
        dist.destroy_process_group()

    def _handle(self, name: str, ranks: tuple[int, ...], *, process_group: dist.ProcessGroup | None = None) -> Group:
        return Group(name, ranks, ranks.index(self.rank), process_group, self.traffic, self._scratch, self.place)


def _new_group(
    name: str, ranks: tuple[int, ...], *, timeout: timedelta, backend: str | None = None
) -> dist.ProcessGroup | None:
    assert list(ranks) == sorted(ranks), "torch sorts the ranks; slices would then reach the wrong member"
    return dist.new_group(list(ranks), timeout=timeout, backend=backend, group_desc=name)


def _join_world(launch: Launch, backend: str, *, timeout_s: float) -> None:
    """Meet the other ranks at torchrun's address."""
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:
        raise EnvironmentFault(
            f"rank {launch.rank} of {launch.world_size} could not join the others over {backend}",
            why=str(error).splitlines()[0],
            fix="check that every rank started and can reach MASTER_ADDR:MASTER_PORT",
        ) from error
