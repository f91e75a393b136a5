"""What the layers of a stage talk over: `ModelParallel`, handed from the stage down to each layer."""

from dataclasses import dataclass

from nanotrain.parallel.cp.attention import Core
from nanotrain.parallel.cp.plain import PlainCore
from nanotrain.parallel.tp.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class ModelParallel:
    """The groups of a stage, each wrapped in the part that speaks over it.

    Attributes:
        tp: cuts matrices and the vocabulary.
        core: attention over sequences that the cp group shares.
    """

    tp: TensorParallel
    core: Core

    @classmethod
    def alone(cls) -> "ModelParallel":
        """The whole model on one rank."""
        return cls(tp=TensorParallel.alone(), core=PlainCore())
