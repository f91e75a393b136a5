"""Every group of ranks a job uses, as a pure function of what was asked and the number of ranks.

Two grids lie over the same ranks: `dense` (tp cp dp pp) and `expert` (etp ep expert_dp pp). Expert parallelism is
carved out of dp x cp (x tp); it is no further factor of the world size. dp and expert_dp are what is left.

    tp  activations, vocab-parallel loss     dp_cp        dense gradients and the loss
    cp  keys and values                      dp_shard     dp_cp inside an optimizer instance (ZeRO)
    ep  tokens to experts                    dp_replicate dp_cp across optimizer instances (HSDP)
    pp  activations between stages           expert_dp    expert gradients; _shard, _replicate likewise
    dp  which samples a rank reads           tp_cp        tokens of one sequence (routers)
                                             model        tp x pp: one whole copy of the model
    etp activations inside an expert         embed        first and last stage (tied embeddings)

Without sharding (`no_shard`) the shard group is the rank alone and everything else is replication: the same code.
"""

from dataclasses import dataclass

from nanotrain.config.config import ParallelConfig, ShardingStrategy
from nanotrain.topology.arrange import arrange
from nanotrain.topology.grid import Grid

RankGroup = tuple[int, ...]

# name -> the axes of the one grid that has them all; the whole group before it is split into instances
DENSE_GROUPS = {
    "tp": ("tp",),
    "cp": ("cp",),
    "pp": ("pp",),
    "dp": ("dp",),
    "dp_cp": ("cp", "dp"),
    "dp_shard": ("cp", "dp"),
    "dp_replicate": ("cp", "dp"),
    "tp_cp": ("tp", "cp"),
    "model": ("tp", "pp"),
    "embed": ("pp",),
    "world": ("tp", "cp", "dp", "pp"),
}
EXPERT_GROUPS = {
    "ep": ("ep",),
    "etp": ("etp",),
    "expert_dp": ("expert_dp",),
    "expert_dp_shard": ("expert_dp",),
    "expert_dp_replicate": ("expert_dp",),
}
GROUP_NAMES = (
    *("tp", "cp", "ep", "pp", "dp", "dp_cp", "dp_shard", "dp_replicate"),
    *("etp", "expert_dp", "expert_dp_shard", "expert_dp_replicate", "tp_cp", "model", "embed", "world"),
)


@dataclass(frozen=True)
class Topology:
    """The ranks of a job and the groups they form.

    Args:
        dense: the grid of everything but experts; its axes are tp, cp, dp, pp in the order asked for.
        expert: the grid of experts over the same ranks; its axes are etp, ep, expert_dp, pp.
        num_instances: optimizer instances: state is sharded inside each and replicated across them.
        is_sharded: False for `no_shard`: every rank is a shard group of its own.

    >>> topology = Topology.of(ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2), 8)
    >>> topology.groups_of("dp")
    ((0, 2), (1, 3), (4, 6), (5, 7))
    """

    dense: Grid
    expert: Grid
    num_instances: int = 1
    is_sharded: bool = True

    @classmethod
    def of(cls, parallel: ParallelConfig, world_size: int) -> "Topology":
        """The topology that a configuration asks for.

        Raises:
            TopologyError: ranks that cannot form the groups; says the numbers and a cure.
        """
        is_sharded = parallel.data_parallel_sharding_strategy is not ShardingStrategy.no_shard
        grids = arrange(parallel, world_size, is_sharded=is_sharded)
        return cls(grids.dense, grids.expert, parallel.num_distributed_optimizer_instances, is_sharded)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dense.world_size

    @property
    def shard_size(self) -> int:
        """Ranks that share one copy of dense optimizer state."""
        return self.dense.size("cp") * self.dense.size("dp") // self.num_instances if self.is_sharded else 1

    @property
    def expert_shard_size(self) -> int:
        """Ranks that share one copy of expert optimizer state."""
        return self.expert.size("expert_dp") // self.num_instances if self.is_sharded else 1

    def size(self, name: str) -> int:
        """Ranks in a group."""
        return len(self.members(0, name))  # rank 0 is in a group of every name, and all groups of a name are equal

    def coords(self, rank: int) -> dict[str, int]:
        """A rank's place in every group that an axis or a split of data parallelism forms, by group name."""
        dense, expert = self.dense.coords(rank), self.expert.coords(rank)
        dp_cp = dense["cp"] + self.dense.size("cp") * dense["dp"]
        splits = {
            "dp_cp": dp_cp,
            "dp_shard": dp_cp % self.shard_size,
            "dp_replicate": dp_cp // self.shard_size,
            "expert_dp_shard": expert["expert_dp"] % self.expert_shard_size,
            "expert_dp_replicate": expert["expert_dp"] // self.expert_shard_size,
        }
        return dense | expert | splits

    def members(self, rank: int, name: str) -> RankGroup:
        """The group of a rank, ascending; empty where it is in none (`embed` on a middle stage)."""
        grid, axes = self._grid_of(name)
        parts = self._split(name, grid.members(rank, *axes))
        return next((part for part in parts if rank in part), ())

    def groups_of(self, name: str) -> tuple[RankGroup, ...]:
        """All groups of one name, ascending."""
        grid, axes = self._grid_of(name)
        return tuple(sorted(part for whole in grid.groups(*axes) for part in self._split(name, whole)))

    def groups(self) -> dict[str, tuple[RankGroup, ...]]:
        """All groups of all names."""
        return {name: self.groups_of(name) for name in GROUP_NAMES}

    def _grid_of(self, name: str) -> tuple[Grid, tuple[str, ...]]:
        return (self.expert, EXPERT_GROUPS[name]) if name in EXPERT_GROUPS else (self.dense, DENSE_GROUPS[name])

    def _split(self, name: str, whole: RankGroup) -> list[RankGroup]:
        """The groups of `name` among the ranks of one whole group."""
        if name == "embed":
            return [whole if len(whole) == 1 else (whole[0], whole[-1])]
        size = self.expert_shard_size if name in EXPERT_GROUPS else self.shard_size
        if name.endswith("_shard"):
            return [whole[first : first + size] for first in range(0, len(whole), size)]
        if name.endswith("_replicate"):
            return [whole[first::size] for first in range(size)]
        return [whole]
