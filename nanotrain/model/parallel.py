"""What the layers of a stage talk over: `ModelParallel`, handed from the stage down to each layer."""

from dataclasses import dataclass

from nanotrain.comm.group import Group
from nanotrain.parallel.cp.attention import CoreAttention
from nanotrain.parallel.cp.sdpa import SDPAttention
from nanotrain.parallel.tp.tensor_parallel import TensorParallel
from nanotrain.topology.groups import GroupName


@dataclass(frozen=True)
class ModelParallel:
    """The groups of a stage, each wrapped in the part that speaks over it.

    Attributes:
        tp: cuts matrices and the vocabulary.
        core: attention over sequences that the cp group shares.
        ep: ranks that share the experts.
        etp: ranks that share every expert's matrices.
        sequence: ranks that hold the tokens of one sequence (tp x cp).
    """

    tp: TensorParallel
    core_attention: CoreAttention
    ep: Group
    etp: Group
    sequence: Group

    @classmethod
    def single_rank(cls) -> "ModelParallel":
        """The whole model on one rank."""
        names: tuple[GroupName, ...] = ("ep", "etp", "tp_cp")
        return cls(TensorParallel.single_rank(), SDPAttention(), *(Group.single_rank(name) for name in names))
