"""`ModelParallel`: the groups, the core attention and the recomputation of a stage's layers."""

from dataclasses import dataclass, field, replace

from nanotrain.attention.call import CoreAttention
from nanotrain.attention.sdpa import SDPAttention
from nanotrain.comm.group import Group
from nanotrain.memory.recompute import Recompute
from nanotrain.parallel.tp.tensor_parallel import TensorParallel
from nanotrain.topology.groups import GroupName


@dataclass(frozen=True)
class ModelParallel:
    """How the layers of a stage are parallelized."""

    tp: TensorParallel  # shards matrices and the vocabulary
    core_attention: CoreAttention  # attention over sequences sharded over cp
    ep: Group  # ranks that share the experts
    etp: Group  # ranks that share the matrices of each expert
    # ranks that hold the tokens of one sequence (tp x cp); a single rank if every rank has all tokens (generation)
    sequence: Group
    dp: Group  # ranks that read different samples
    recompute: Recompute = field(default_factory=Recompute)  # recomputation in the stage
    tracks_logits: bool = False  # attention layers keep their largest logits, for QK-clip
    layers_in_bf16: frozenset[int] = frozenset()  # layers without fp8, where others have it

    def of_layer(self, layer: int) -> "ModelParallel":
        """The groups and options of one layer, without fp8 if the layer is excluded from it."""
        return replace(self, tp=replace(self.tp, fp8=None)) if layer in self.layers_in_bf16 else self

    @classmethod
    def single_rank(cls) -> "ModelParallel":
        """One rank, without model parallelism."""
        names: tuple[GroupName, ...] = ("ep", "etp", "tp_cp", "dp")
        ep, etp, sequence, dp = (Group.single_rank(name) for name in names)
        return cls(TensorParallel.single_rank(), SDPAttention(), ep=ep, etp=etp, sequence=sequence, dp=dp)
