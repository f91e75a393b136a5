"""This rank's device and groups; the only file that creates process groups.

    ParallelContext.start     from torchrun's environment; without it, one rank and no process group
    ParallelContext.attach    on a default process group that exists already (tests, notebooks)
    Launch                    torchrun's environment variables; their only reader

Groups with the same ranks share one process group, whatever their names; groups of one rank have none. A gloo group
has 3 threads and 5 file descriptors, an NCCL group buffers of its own, so sharing them matters.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nanotrain.comm import flight_recorder
from nanotrain.comm.device import backend_of, pick_device, process_group_device
from nanotrain.comm.group import Group
from nanotrain.comm.heartbeat import Heartbeat
from nanotrain.comm.scratch import Scratch
from nanotrain.comm.traffic import TrafficCounter
from nanotrain.errors import EnvironmentFault
from nanotrain.topology.groups import GroupName, GroupSpec, Ranks
from nanotrain.topology.topology import Topology


@dataclass(frozen=True)
class Launch:
    """The rank, local rank and world size that torchrun assigned to this process."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    is_distributed: bool = False
    local_world_size: int = 1  # ranks of this machine

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Launch":
        """Read torchrun's variables; without them, a world of one rank.

        >>> Launch.of({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"})
        Launch(rank=3, local_rank=1, world_size=4, is_distributed=True, local_world_size=1)

        Raises:
            EnvironmentFault: only some of RANK, WORLD_SIZE and LOCAL_RANK are set, or they contradict each other.
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        given = [name for name in names if name in environment]
        if not given:
            return cls()
        missing = [name for name in names if name not in environment]
        if missing:
            raise EnvironmentFault(
                f"{', '.join(given)} set but not {', '.join(missing)} in the environment",
                why="a distributed run needs all three",
                fix="start with torchrun, or unset them all for one process",
            )
        for name in names:
            if not environment[name].isdecimal():
                raise EnvironmentFault(f"{name} is {environment[name]!r} in the environment", why="it is not a number")
        rank, world_size, local_rank = (int(environment[name]) for name in names)
        if rank >= world_size:
            raise EnvironmentFault(f"RANK is {rank} in a world of {world_size}", why="ranks are numbered from 0")
        local_world_size = environment.get("LOCAL_WORLD_SIZE", "1")
        return cls(rank, local_rank, world_size, True, int(local_world_size) if local_world_size.isdecimal() else 1)


class ParallelContext:
    """This rank's device and groups; created by `start` or `attach`.

    Attributes:
        topology: the plan of all groups.
        rank: global rank.
        coords: coordinate on every axis.
        coords_text: the same for messages, dense axes longer than one only ("pp1 dp3 tp0").
        device: where this rank's tensors are.
        groups: this rank's groups by name; no `embed` on a stage that is neither first nor last.
        control: all ranks over gloo, for objects and barriers, whatever the device.
        traffic: bytes sent over all groups.
        heartbeat: what this rank does, for the watchdog.
        timeout_s: how long a collective waits for a slow or lost rank.
    """

    def __init__(self, topology: Topology, rank: int, *, device: torch.device) -> None:
        self.topology, self.rank, self.device = topology, rank, device
        self.coords, self.coords_text = topology.coords(rank), topology.coords_text(rank)
        self.traffic, self._scratch, self.heartbeat = TrafficCounter(), Scratch(), Heartbeat()
        self.groups: dict[GroupName, Group] = {}
        self.timeout_s = 0.0
        self.control = self._group(GroupSpec.single_rank("control", rank))

    def group(self, name: GroupName) -> Group:
        """This rank's group of that name ("tp", "dp_shard", ...)."""
        return self.groups[name]

    @classmethod
    @contextmanager
    def start(
        cls, topology: Topology, *, device: str = "auto", timeout_s: float = 600.0
    ) -> Iterator["ParallelContext"]:
        """Join the world that torchrun launched; leaving the block without an error destroys all process groups.

        After an error they are left as they are: destroying them waits for peers that may be inside a collective, on
        NCCL forever. The entry point ends the process at once.

        `device` is "auto", "cpu" or "cuda"; `timeout_s` is how long a collective waits for a slow or lost rank.

        Raises:
            EnvironmentFault: the environment, the world size or the devices do not fit the topology.
        """
        launch = Launch.of(os.environ)
        if launch.world_size != topology.world_size:
            raise EnvironmentFault(
                f"{launch.world_size} ranks were launched for a topology of {topology.world_size}",
                why="the topology is planned for the world it runs in",
                fix=f"launch {topology.world_size} ranks, or plan the topology for {launch.world_size}",
            )
        chosen = pick_device(device, launch.local_rank)
        if not launch.is_distributed:
            yield cls(topology, 0, device=chosen)._with_groups(timeout_s)
            return
        flight_recorder.switch_on()
        _join_world(launch, backend_of(chosen), timeout_s=timeout_s)
        context = cls(topology, launch.rank, device=chosen)
        yield context._with_groups(timeout_s)
        context._destroy()

    @classmethod
    def attach(cls, topology: Topology, *, timeout_s: float = 600.0) -> "ParallelContext":
        """The context on the default process group of this process; without one, a world of one rank."""
        if not dist.is_initialized():
            return cls(topology, 0, device=torch.device("cpu"))._with_groups(timeout_s)
        return cls(topology, dist.get_rank(), device=process_group_device(dist.group.WORLD))._with_groups(timeout_s)

    def _with_groups(self, timeout_s: float) -> "ParallelContext":
        """Create one process group per distinct tuple of ranks, and the groups of this rank on them."""
        timeout, self.timeout_s = timedelta(seconds=timeout_s), timeout_s
        specs = self.topology.group_specs(self.rank)
        world = specs["world"]
        process_groups: dict[Ranks, dist.ProcessGroup | None] = {}
        if world.size > 1:
            process_groups[world.ranks] = dist.group.WORLD
            backend = "gloo" if dist.get_backend() == "nccl" else None
            control = _new_group("control", world.ranks, timeout=timeout, backend=backend)
            self.control = self._group(GroupSpec("control", world.ranks, world.index), control)
        # A rank creates its own groups only, of which the members alone synchronize: the work of a start does not grow
        # with the world. All ranks go through the names in one order, and the groups of a name are disjoint, so no two
        # ranks wait for each other.
        for name, spec in specs.items():
            if spec.size > 1 and spec.ranks not in process_groups:
                process_groups[spec.ranks] = _new_group(name, spec.ranks, timeout=timeout)
        self.groups = {name: self._group(spec, process_groups.get(spec.ranks)) for name, spec in specs.items()}
        return self

    def set_timeout(self, timeout_s: float) -> None:
        """Set the timeout of all groups, for operations that start from now on; every rank calls it."""
        self.timeout_s = timeout_s
        for group in (*self.groups.values(), self.control):
            group.set_timeout(timedelta(seconds=timeout_s))

    def _destroy(self) -> None:
        """Destroy all process groups, including those that a `Group` still refers to."""
        # A gloo group that lives until the interpreter exits sometimes aborts the process ("terminate called").
        for group in (*self.groups.values(), self.control):
            group.release()
        dist.destroy_process_group()

    def _group(self, spec: GroupSpec, process_group: dist.ProcessGroup | None = None) -> Group:
        return Group(
            spec,
            process_group,
            traffic=self.traffic,
            scratch=self._scratch,
            coords_text=self.coords_text,
            heartbeat=self.heartbeat,
        )


def _new_group(
    name: str, ranks: tuple[int, ...], *, timeout: timedelta, backend: str | None = None
) -> dist.ProcessGroup | None:
    assert list(ranks) == sorted(ranks), "torch sorts the ranks; slices would then reach the wrong rank"
    options = _options(backend or dist.get_backend(), timeout=timeout)
    # Named after its ranks, not by a counter, which would differ between ranks with other groups.
    return dist.new_group(
        list(ranks),
        timeout=timeout,
        backend=backend,
        pg_options=options,
        use_local_synchronization=True,
        group_desc=name,
    )


def _options(backend: str, *, timeout: timedelta) -> Any:
    """On NCCL streams of high priority: a collective beside a matrix product gets the next free multiprocessors.

    Otherwise its few thread blocks queue behind all of the product's.
    """
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream, options._timeout = True, timeout  # torch warns where the timeouts differ
    return options


def _join_world(launch: Launch, backend: str, *, timeout_s: float) -> None:
    """Create the default process group at torchrun's address."""
    try:
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, timeout=timeout, pg_options=_options(backend, timeout=timeout))
    except (RuntimeError, ValueError) as error:
        raise EnvironmentFault(
            f"rank {launch.rank} of {launch.world_size} could not join the others over {backend}",
            why=str(error).splitlines()[0],
            fix="check that every rank started and can reach MASTER_ADDR:MASTER_PORT",
        ) from error
