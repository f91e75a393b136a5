"""The process groups that a start creates, and their cost: communicators, sockets, bytes through the store. Pure.

    partitions        the sets of groups that are created, by one split of the world each
    control_levels    the gloo groups of the `control` tree that a rank is in
    start_cost        their number and cost

A gloo group connects each rank with every other one, and each rank reads the addresses of all: `n * (154 + 8 * n)`
bytes per rank of n ranks (measured, torch 2.13). So Python objects travel along a tree of small gloo groups. NCCL's
own bootstrap is not counted.
"""

from dataclasses import dataclass
from itertools import pairwise

from nanotrain.topology.groups import GROUP_NAMES, UNCONNECTED, GroupName, Ranks
from nanotrain.topology.topology import Topology

CONTROL_FAN_OUT = 32  # ranks of a gloo group of the control tree: 13 KB per rank through the store


@dataclass(frozen=True)
class StartCost:
    """The cost of a start for one rank whose device is a GPU."""

    num_splits: int  # of the world communicator, in which all ranks take part
    num_process_groups: int  # that this rank is in, the world included
    num_ranks: int  # of these groups together
    control_sockets: int  # of its gloo groups
    control_store_bytes: int  # that this rank reads for them


def partitions(topology: Topology) -> dict[GroupName, tuple[Ranks, ...]]:
    """The groups to create, by their first name, in an order that is the same on every rank.

    Names with the same groups share process groups. The world is not listed, nor are groups of one rank and names that
    nothing is sent over.

    >>> from nanotrain.config.config import ParallelConfig
    >>> partitions(Topology.of(ParallelConfig(tensor_model_parallel_size=2), 4))
    {'tp': ((0, 1), (2, 3)), 'dp': ((0, 2), (1, 3))}
    """
    names: dict[tuple[Ranks, ...], GroupName] = {(tuple(range(topology.world_size)),): "world"}
    for name in GROUP_NAMES:
        groups = tuple(ranks for ranks in topology.groups_of(name) if len(ranks) > 1)
        if groups and name not in UNCONNECTED:
            names.setdefault(groups, name)
    return {name: groups for groups, name in names.items() if name != "world"}


def control_levels(rank: int, world_size: int, *, fan_out: int = CONTROL_FAN_OUT) -> tuple[Ranks, ...]:
    """The groups of the control tree that a rank is in, from the leaves up.

    The ranks of a level form groups of nearly equal sizes, at least 2 and at most `fan_out`; the first ranks of the
    groups form the next level, until one group is left. So every member of a group is also in a group of each lower
    level.

    >>> control_levels(0, 7, fan_out=3), control_levels(4, 7, fan_out=3)
    (((0, 1), (0, 2, 4)), ((4, 5, 6), (0, 2, 4)))
    """
    assert fan_out > 2, "a group of one rank could be left over"
    level: list[int] = list(range(world_size))
    found: list[Ranks] = []
    while len(level) > 1:
        num_groups = -(-len(level) // fan_out)
        bounds = [index * len(level) // num_groups for index in range(num_groups + 1)]
        groups = [tuple(level[first:last]) for first, last in pairwise(bounds)]
        found += [group for group in groups if rank in group]
        level = [group[0] for group in groups]
    return tuple(found)


def start_cost(topology: Topology, rank: int) -> StartCost:
    """The cost for a rank whose device is a GPU.

    Args:
        topology: of the run.
        rank: global rank.
    """
    created, size = partitions(topology), topology.world_size
    groups = [ranks for parts in created.values() for ranks in parts if rank in ranks]
    groups += [tuple(range(size))] if size > 1 else []
    levels = [len(ranks) for ranks in control_levels(rank, size)]
    return StartCost(
        num_splits=len(created),
        num_process_groups=len(groups),
        num_ranks=sum(map(len, groups)),
        control_sockets=sum(level - 1 for level in levels),
        control_store_bytes=sum(level * (154 + 8 * level) for level in levels),
    )
