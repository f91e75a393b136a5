"""Names and specs of the groups of ranks. Pure; `comm/group.py` adds the process group.

name                 Megatron-LM's name                    communicates
tp                   tensor-model-parallel group           activations, vocabulary-parallel loss
cp                   context-parallel group                keys and values
pp                   pipeline-model-parallel group         activations between stages
dp                   data-parallel group                   nothing; its ranks read different samples
dp_cp                data-parallel group with CP           dense gradients, loss
dp_shard             intra-optimizer-instance group        params, grads, optimizer state (ZeRO)
dp_replicate         inter-optimizer-instance group        gradient shards (HSDP)
ep                   expert-model-parallel group           tokens to experts
etp                  expert-tensor-parallel group          activations inside an expert
expert_dp            expert-data-parallel group            expert gradients; _shard, _replicate too
tp_cp                tensor-and-context-parallel group     router statistics of one sequence
model                model-parallel group (TP x PP)        nothing; one replica of the dense weights
embed                embedding group                       gradients of tied embeddings
world                all ranks
control              all ranks, over gloo                  Python objects and barriers
"""

from dataclasses import dataclass
from typing import Literal, get_args

GroupName = Literal[
    "tp",
    "cp",
    "ep",
    "pp",
    "dp",
    "dp_cp",
    "dp_shard",
    "dp_replicate",
    "etp",
    "expert_dp",
    "expert_dp_shard",
    "expert_dp_replicate",
    "tp_cp",
    "model",
    "embed",
    "world",
    "control",
]
Ranks = tuple[int, ...]

# group name -> the axes of the grid that its ranks differ along; instances of the optimizer then
# split some of them
DENSE_GROUPS: dict[str, tuple[str, ...]] = {
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
EXPERT_GROUPS: dict[str, tuple[str, ...]] = {
    "ep": ("ep",),
    "etp": ("etp",),
    "expert_dp": ("expert_dp",),
    "expert_dp_shard": ("expert_dp",),
    "expert_dp_replicate": ("expert_dp",),
}
# nothing is sent over them, so they have no process group
UNCONNECTED: frozenset[str] = frozenset({"model"})
# the planned groups, in the order in which they are listed and created
GROUP_NAMES: tuple[GroupName, ...] = tuple(
    name for name in get_args(GroupName) if name != "control"
)


@dataclass(frozen=True)
class GroupSpec:
    """A group of ranks, and the index of one member in it.

    >>> spec = GroupSpec("dp", ranks=(1, 5, 9), index=2)
    >>> spec.rank, spec.size
    (9, 3)
    """

    name: GroupName  # the axis or axes that it spans
    ranks: Ranks  # global ranks, ascending
    index: int  # position of this rank in `ranks`

    def __post_init__(self) -> None:
        assert 0 <= self.index < len(self.ranks), (
            "a rank only has specs of groups that it belongs to"
        )

    @classmethod
    def single_rank(cls, name: GroupName, rank: int = 0) -> "GroupSpec":
        """The group that contains one rank only."""
        return cls(name, (rank,), 0)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """This rank's global rank."""
        return self.ranks[self.index]

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of the group."""
        return self.index == 0
