"""Creates torch's process groups; the only file that does.

join_world        the default process group, at the store where the ranks met
rejoin_world      the default process group again, once all others are destroyed
leave_world       destroy all of them after a fault
create_groups     one per distinct set of ranks of this rank; by splits of the world on NCCL
create_control    the gloo groups of the control tree
"""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from nanotrain.comm.device import process_group_device
from nanotrain.comm.meeting import meet
from nanotrain.comm.work import CommunicationFault
from nanotrain.errors import EnvironmentFault
from nanotrain.topology.groups import UNCONNECTED, Ranks
from nanotrain.topology.topology import CONTROL_FAN_OUT, Topology, control_levels, partitions


def join_world(
    rank: int,
    world_size: int,
    *,
    device: torch.device,
    timeout: timedelta,
    store: Store | None = None,
) -> None:
    """Create the default process group at torchrun's address, or in a store.

    On a GPU it is bound to the device, so its communicator exists on return and other groups can be
    split from it.

    Raises:
        CommunicationFault: the ranks do not meet, or one died meanwhile.
    """
    backend = dist.get_default_backend_for_device(device)
    bound = device if backend == "nccl" else None
    try:
        options = _options(backend, timeout=timeout)
        dist.init_process_group(
            backend,
            store=store or meet(rank, world_size, timeout=timeout),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            pg_options=options,
            device_id=bound,
        )
        if bound is not None:
            _name_ranks(bound, world_size)
    except (RuntimeError, ValueError) as error:
        raise CommunicationFault(
            f"rank {rank} of {world_size} could not join the others over {backend}",
            why=str(error).splitlines()[0],
            fix="check that every rank started and can reach MASTER_ADDR:MASTER_PORT",
        ) from error


def rejoin_world(name: str, *, world_size: int, timeout: timedelta) -> None:
    """Destroy all process groups and create the default one again.

    Every rank calls this, with no collective under way.

    Args:
        name: prefix of the new groups' keys in the store, which still has keys of the old groups.
        world_size: number of ranks; fewer than before where the last ones have left.
        timeout: timeout of its collectives.
    """
    world: Any = dist.group.WORLD
    backend = dist.get_backend()
    bound = getattr(world, "bound_device_id", None)
    rank = dist.get_rank()
    store = PrefixStore(f"{name}/", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        pg_options=_options(backend, timeout=timeout),
        device_id=bound,
    )
    if bound is not None:
        _name_ranks(bound, world_size)


def leave_world() -> None:
    """Destroy all process groups after a fault, while peers may be inside a collective."""
    if not dist.is_initialized():
        return
    if dist.get_backend() == "nccl":  # it would wait for them
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


def _name_ranks(device: torch.device, world_size: int) -> None:
    """Give the world's backend the ranks that splits of it read.

    torch leaves them out, which it makes up for in the first NCCL group of a process only: in a
    second world, as of a second run in one program, a split would end the process
    (https://github.com/pytorch/pytorch/pull/192109).
    """
    world: Any = dist.group.WORLD
    world._get_backend(device).options.global_ranks_in_group = list(range(world_size))


def create_groups(
    topology: Topology, rank: int, *, timeout: timedelta
) -> dict[Ranks, dist.ProcessGroup | None]:
    """Create a process group for every distinct set of several ranks that a rank is in.

    The world is included: the default process group, or its first ranks in a smaller topology.
    """
    all_ranks = tuple(range(topology.world_size))
    world = _first_ranks(all_ranks, timeout=timeout)
    if topology.world_size == 1 or rank not in all_ranks:
        return {}
    groups: dict[Ranks, dist.ProcessGroup | None] = {all_ranks: world}
    if _can_split():
        # All ranks of the world take part in every split, in the same order; a rank in none of the
        # groups gets None.
        for name, parts in partitions(topology).items():
            split = dist.split_group(
                parent_pg=world,
                split_ranks=[list(part) for part in parts],
                timeout=timeout,
                group_desc=name,
            )
            groups |= {part: split for part in parts if rank in part}
        _check_sizes(groups)
        return groups
    # A rank creates only its own groups, and only their members synchronize, so the cost of a start
    # does not grow with the world. All ranks use the same order of names, and the groups of a name
    # are disjoint, so no two ranks wait for each other.
    for name, spec in topology.group_specs(rank).items():
        if spec.size > 1 and spec.ranks not in groups and name not in UNCONNECTED:
            groups[spec.ranks] = _new_group(name, spec.ranks, timeout=timeout)
    return groups


def _first_ranks(ranks: Ranks, *, timeout: timedelta) -> dist.ProcessGroup | None:
    """The default process group, or a new group of its first ranks; None for other ranks."""
    if not dist.is_initialized() or len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    if _can_split():  # all ranks take part
        split: dist.ProcessGroup | None = dist.split_group(
            split_ranks=[list(ranks)], timeout=timeout, group_desc="world"
        )
        return split
    if len(ranks) == 1 or dist.get_rank() not in ranks:
        return None
    return _new_group("world", ranks, timeout=timeout)


def create_control(
    rank: int, world_size: int, *, timeout: timedelta, fan_out: int | None = None
) -> list[tuple[Ranks, dist.ProcessGroup | None]]:
    """A rank's gloo groups for objects: a tree if groups are split, else one group of all ranks.

    Called before `create_groups`. torch names a group after its ranks and the number of groups that
    the rank already has, and gloo's ranks meet under that name. Before the tree that number is the
    same on all members of a group; after it the numbers differ, which does not affect split groups.

    Args:
        rank: global rank.
        world_size: number of ranks.
        timeout: timeout of their collectives.
        fan_out: largest group of the tree; None: CONTROL_FAN_OUT if groups are split, else all
            ranks.
    """
    backend = "gloo" if dist.get_backend() == "nccl" else None
    fan_out = fan_out or (CONTROL_FAN_OUT if _can_split() else max(world_size, 3))
    levels = control_levels(rank, world_size, fan_out=fan_out)
    return [
        (ranks, _new_group("control", ranks, timeout=timeout, backend=backend)) for ranks in levels
    ]


def _can_split() -> bool:
    """Whether groups can be split from the world's communicator; equal on every rank.

    The communicator exists already.
    """
    world = dist.group.WORLD
    device = getattr(world, "bound_device_id", None)
    if dist.get_backend() != "nccl" or world is None or device is None:
        return False
    return bool(world._get_backend(device).supports_splitting)


def _check_sizes(groups: Mapping[Ranks, dist.ProcessGroup | None]) -> None:
    """Check the sizes of split groups by an all-reduce of ones.

    NCCL identifies the parts of a split by a number, which torch computes as a hash of their ranks:
    two parts with the same hash would become one communicator, in silence.
    """
    for ranks, process_group in groups.items():
        size = torch.ones((), device=process_group_device(dist.group.WORLD))
        dist.all_reduce(size, group=process_group)
        if size != len(ranks):
            group = f"a group of {len(ranks)} ranks (first {ranks[0]}, last {ranks[-1]})"
            raise EnvironmentFault(
                f"{group} has {size.item():g} members",
                why="torch gave two groups of one split the same number",
                fix="use another layout or number of ranks, or report it to PyTorch",
            )


def _new_group(
    name: str, ranks: tuple[int, ...], *, timeout: timedelta, backend: str | None = None
) -> dist.ProcessGroup | None:
    """Create a torch process group; called by the members only. None for other ranks."""
    assert list(ranks) == sorted(ranks), (
        "torch sorts the ranks; slices would then reach the wrong rank"
    )
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
    """Options of a process group: high-priority streams on NCCL.

    A collective that overlaps a matrix product then gets the next free multiprocessors.

    Otherwise its few thread blocks wait for all blocks of the product. Split groups inherit the
    options of the world.
    """
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options()
    # torch warns where the timeouts differ
    options.is_high_priority_stream, options._timeout = True, timeout
    return options
