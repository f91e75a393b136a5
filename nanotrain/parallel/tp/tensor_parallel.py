"""How activations pass into and out of the part of a layer whose weights are cut over the tp group.

    without sequence parallelism            with it
    x [B, S, H], the same on all            x [B, S/tp, H], each rank its own tokens
      |  enter: nothing                       |  enter: all-gather
    column-parallel, attention or MLP, row-parallel: [B, S, H] parts of one sum
      |  leave: all-reduce                    |  leave: reduce-scatter
    y [B, S, H], the same on all            y [B, S/tp, H]

Backward they change places: entering sums the gradients, leaving spreads them. Both variants move the same bytes.

B batch   S sequence   H hidden
"""

from dataclasses import dataclass, replace

from torch import Tensor, nn

from nanotrain.comm.autograd import copy_to, gather_along, reduce_from, scatter_along
from nanotrain.comm.collectives import local_slice, start_all_gather, start_all_reduce, start_reduce_scatter
from nanotrain.comm.group import Group
from nanotrain.comm.work import Work
from nanotrain.parallel.tp.weight_grads import WeightGradQueue

SEQUENCE = 1  # the dim of [B, S, H] that sequence parallelism cuts


@dataclass(frozen=True)
class TensorParallel:
    """The group that a layer's weights are cut over.

    Args:
        group: the tp group.
        sequence_parallel: between the cut layers, each rank holds its slice of the sequence.
        weight_grads: where layers put off their weight gradients; None computes them at once.
    """

    group: Group
    sequence_parallel: bool = False
    weight_grads: WeightGradQueue | None = None

    @classmethod
    def single_rank(cls) -> "TensorParallel":
        """Nothing is cut."""
        return cls(Group.single_rank("tp"))

    @property
    def inside(self) -> "TensorParallel":
        """What holds between enter and leave: nothing more to cross."""
        return replace(self, group=Group.single_rank("tp"), sequence_parallel=False)

    @property
    def is_plain(self) -> bool:
        """Whether torch's own operators do all that is asked for."""
        return self.group.size == 1 and self.weight_grads is None

    def late(self, parameter: nn.Parameter) -> Tensor:
        """The parameter, for a layer that leaves its gradient to autograd, so that it waits with the others."""
        return parameter if self.weight_grads is None else self.weight_grads.late(parameter)

    def enter(self, x: Tensor) -> Tensor:
        """[B, S or S/tp, H] -> [B, S, H]; the gradients that come back from all ranks are summed once per call."""
        return gather_along(x, self.group, dim=SEQUENCE) if self.sequence_parallel else copy_to(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """[B, S, H], parts of a sum -> the sum, [B, S or S/tp, H]."""
        return scatter_along(x, self.group, dim=SEQUENCE) if self.sequence_parallel else reduce_from(x, self.group)

    def own_part(self, tensor: Tensor) -> Tensor:
        """[B, S, ...], the same on all ranks (positions, masks) -> the part of the tokens held outside cut layers."""
        return local_slice(tensor, self.group, dim=SEQUENCE) if self.sequence_parallel else tensor

    def start_entering(self, x: Tensor) -> Work[Tensor]:
        """The forward of `enter`, without autograd and without waiting."""
        return start_all_gather(x, self.group, dim=SEQUENCE) if self.sequence_parallel else Work.completed(x)

    def start_summing(self, grad: Tensor) -> Work[Tensor]:
        """The backward of `enter`; a contiguous `grad` [B, S, H] is overwritten."""
        return (
            start_reduce_scatter(grad, self.group, dim=SEQUENCE)
            if self.sequence_parallel
            else start_all_reduce(grad, self.group)
        )
