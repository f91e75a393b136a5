"""Every group of ranks of a job, as a pure function of the parallel sizes and the number of ranks.

    Topology          the groups of a rank and of all ranks
    partitions        the sets of groups that a start creates, by one split of the world each
    control_levels    the gloo groups of the `control` tree that a rank is in

Two grids cover the same ranks: `dense` (tp cp dp pp) and `expert` (etp ep expert_dp pp). Expert
parallelism divides the ranks of dp x cp (x tp) and is not a further factor of the world size. dp
and expert_dp follow from the other sizes. `groups.py` lists the group names.

With `no_shard` a shard group is a single rank and the replicate group contains the other
data-parallel ranks.

A gloo group connects each rank with every other one, and each rank reads the addresses of all: `n *
(154 + 8 * n)` bytes per rank of n ranks (measured, torch 2.13). So Python objects travel along a
tree of small gloo groups.
"""

from dataclasses import dataclass
from itertools import pairwise

from nanotrain.config.parallel import ParallelConfig
from nanotrain.topology.grid import Grid, arrange
from nanotrain.topology.groups import (
    DENSE_GROUPS,
    EXPERT_GROUPS,
    GROUP_NAMES,
    UNCONNECTED,
    GroupName,
    GroupSpec,
    Ranks,
)


@dataclass(frozen=True)
class Topology:
    """The ranks of a job and the groups they form.

    >>> parallel = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    >>> topology = Topology.of(parallel, 8)
    >>> topology.groups_of("dp")
    ((0, 2), (1, 3), (4, 6), (5, 7))
    >>> topology.group_specs(6)["dp"]
    GroupSpec(name='dp', ranks=(4, 6), index=1)
    """

    dense: Grid  # the grid of all layers but experts, with the axes tp, cp, dp, pp
    expert: Grid  # the grid of experts over the same ranks, with the axes etp, ep, expert_dp, pp
    # pipeline ranks of the first and the last stage; one where it has both
    end_ranks: tuple[int, ...]
    # optimizer instances; state is sharded inside each and replicated across them
    num_instances: int = 1
    is_sharded: bool = True  # False for `no_shard`, where every shard group is a single rank

    @classmethod
    def of(
        cls, parallel: ParallelConfig, world_size: int, *, has_experts: bool = True
    ) -> "Topology":
        """The topology of a parallel config on `world_size` ranks.

        Without experts the groups of experts are never used.

        Raises:
            TopologyError: the ranks cannot form the groups; names the numbers and a fix.
        """
        dense, expert = arrange(parallel, world_size, has_experts=has_experts)
        is_sharded = parallel.data_parallel_sharding_strategy != "no_shard"
        num_instances = parallel.num_distributed_optimizer_instances
        return cls(dense, expert, parallel.end_ranks, num_instances, is_sharded)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dense.world_size

    def size(self, name: GroupName) -> int:
        """Ranks per group of this name."""
        # rank 0 is in a group of every name, and groups of a name have equal sizes
        return len(self.members(0, name))

    def coords(self, rank: int) -> dict[str, int]:
        """A rank's coordinate on every axis."""
        # without experts the dense grid has the stage
        return self.expert.coords(rank) | self.dense.coords(rank)

    def coords_text(self, rank: int) -> str:
        """A rank's coordinates on the dense axes longer than one, for messages: "pp1 dp3 tp0"."""
        coords = self.dense.coords(rank)
        axes = [axis for axis in reversed(self.dense.axes) if self.dense.size(axis) > 1]
        return " ".join(f"{axis}{coords[axis]}" for axis in axes)

    def members(self, rank: int, name: GroupName) -> Ranks:
        """The ranks of a rank's group, ascending.

        Empty if the rank is in none (`embed` on a middle stage).
        """
        ranks = self._grid(name).members(rank, *axes_of(name))
        for group in self._split(name, ranks):
            if rank in group:
                return group
        return ()

    def group_specs(self, rank: int) -> dict[GroupName, GroupSpec]:
        """All groups of a rank by name."""
        specs = {}
        for name in GROUP_NAMES:
            ranks = self.members(rank, name)
            if ranks:
                specs[name] = GroupSpec(name, ranks, ranks.index(rank))
        return specs

    def groups_of(self, name: GroupName) -> tuple[Ranks, ...]:
        """All groups of one name, ascending."""
        groups = []
        for ranks in self._grid(name).groups(*axes_of(name)):
            groups += self._split(name, ranks)
        return tuple(sorted(groups))

    def _grid(self, name: GroupName) -> Grid:
        """The grid whose axes a group spans."""
        return self.expert if name in EXPERT_GROUPS else self.dense

    def _split(self, name: GroupName, ranks: Ranks) -> list[Ranks]:
        """Split ranks that differ along the axes of `name` into the groups of `name`."""
        if name == "embed":
            return [tuple(ranks[index] for index in self.end_ranks)]
        size = 1  # ranks that share one replica of the optimizer state
        if self.is_sharded:
            size = len(ranks) // self.num_instances
        if name.endswith("_shard"):
            return [ranks[first : first + size] for first in range(0, len(ranks), size)]
        if name.endswith("_replicate"):
            return [ranks[first::size] for first in range(size)]
        return [ranks]


def axes_of(name: GroupName) -> tuple[str, ...]:
    """The axes of a grid (dense or expert) along which the ranks of a group differ."""
    return EXPERT_GROUPS[name] if name in EXPERT_GROUPS else DENSE_GROUPS[name]


CONTROL_FAN_OUT = 32  # ranks of a gloo group of the control tree: 13 KB per rank through the store


def partitions(topology: Topology) -> dict[GroupName, tuple[Ranks, ...]]:
    """The groups to create, by the first of their names, in the same order on every rank.

    Names with the same groups share process groups. The world is not listed, nor are groups of one
    rank and names that nothing is sent over.

    >>> from nanotrain.config.config import ParallelConfig
    >>> partitions(Topology.of(ParallelConfig(tensor_model_parallel_size=2), 4))
    {'tp': ((0, 1), (2, 3)), 'dp': ((0, 2), (1, 3))}
    """
    world = tuple(range(topology.world_size))
    listed: dict[GroupName, tuple[Ranks, ...]] = {}
    for name in GROUP_NAMES:
        if name in UNCONNECTED:
            continue
        groups = tuple(ranks for ranks in topology.groups_of(name) if len(ranks) > 1)
        is_new = groups not in listed.values()
        if groups and groups != (world,) and is_new:
            listed[name] = groups
    return listed


def control_levels(
    rank: int, world_size: int, *, fan_out: int = CONTROL_FAN_OUT
) -> tuple[Ranks, ...]:
    """The groups of the control tree that a rank is in, from the leaves up.

    The ranks of a level form groups of nearly equal sizes, at least 2 and at most `fan_out`; the
    first ranks of the groups form the next level, until one group is left. So every member of a
    group is also in a group of each lower level.

    >>> control_levels(0, 7, fan_out=3), control_levels(4, 7, fan_out=3)
    (((0, 1), (0, 2, 4)), ((4, 5, 6), (0, 2, 4)))
    """
    assert fan_out > 2, "a group of one rank could be left over"
    level_ranks: list[int] = list(range(world_size))
    groups_of_rank: list[Ranks] = []
    while len(level_ranks) > 1:
        num_groups = -(-len(level_ranks) // fan_out)
        bounds = [index * len(level_ranks) // num_groups for index in range(num_groups + 1)]
        groups = [tuple(level_ranks[start:stop]) for start, stop in pairwise(bounds)]
        level_ranks = []
        for group in groups:
            level_ranks.append(group[0])
            if rank in group:
                groups_of_rank.append(group)
    return tuple(groups_of_rank)
