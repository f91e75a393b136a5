"""The mixture-of-experts layer: a router, experts of which each token uses a few, and a shared one that all use.

    hidden --+-- own tokens -- router -- dispatch -- experts -- combine -- all tokens --+-- out
             +-- shared expert (an ordinary tensor-parallel MLP) -----------------------+

Every rank brings tokens of its own to the experts. With sequence parallelism its tokens are its own already; without,
all ranks of tp hold the same ones, so each takes its slice of the sequence and the results are joined again.

    B batch   S tokens of a sequence as the layer gets them   H hidden
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from nanotrain.comm.autograd import concat_along, split_along
from nanotrain.comm.group import Group
from nanotrain.config.config import Activation, ModelConfig
from nanotrain.config.derive import moe_ffn_size
from nanotrain.errors import TopologyError
from nanotrain.model.mlp import ACTIVATIONS
from nanotrain.model.router import MoEContext, Router
from nanotrain.parallel.ep.dispatch import build_dispatch
from nanotrain.parallel.ep.experts import Experts, ExpertShape
from nanotrain.parallel.tp.layers import ColumnParallelLinear, RowParallelLinear, column_parallel
from nanotrain.parallel.tp.tensor_parallel import TensorParallel

_SEQUENCE = 1  # the dim of [B, S, H] that is split over tp


class HasMoE(Protocol):
    """What the layer reads of the context that all layers of a batch share."""

    @property
    def moe(self) -> MoEContext:
        """Of the batch."""


@dataclass(frozen=True)
class MoEGroups:
    """Whom the layer talks to.

    Args:
        tensor_parallel: of the shared expert, and the ranks among which a sequence is split (tp).
        ep: ranks that share the experts.
        etp: ranks that share every expert's matrices.
        sequence: ranks that hold the tokens of one sequence (tp x cp).
    """

    tensor_parallel: TensorParallel
    ep: Group
    etp: Group
    sequence: Group

    @classmethod
    def alone(cls) -> "MoEGroups":
        """One rank that holds everything."""
        return cls(TensorParallel.alone(), Group.alone("ep"), Group.alone("etp"), Group.alone("sequence"))


class MoELayer(nn.Module):
    """Stands where an MLP stands, on the meta device.

    Args:
        model: the whole model's shape.
        dtype: of the parameters and activations.
        groups: whom the layer talks to.

    Raises:
        TopologyError: experts that the groups cannot share.
    """

    def __init__(self, model: ModelConfig, *, dtype: torch.dtype, groups: MoEGroups) -> None:
        super().__init__()
        assert model.num_experts is not None, "a dense layer has no experts"
        tensor_parallel = groups.tensor_parallel
        self._tp = tensor_parallel.group
        self._split = Group.alone("tp") if tensor_parallel.sequence_parallel else tensor_parallel.group
        self.router = Router(model, dtype=dtype, sequence=groups.sequence)
        self.experts = Experts(
            expert_shape(model, groups),
            dtype=dtype,
            may_drop=model.moe_expert_capacity_factor is not None,
            weight_grads=tensor_parallel.weight_grads,
        )
        self._dispatch = build_dispatch(model.num_experts, ep=groups.ep, etp=groups.etp)
        self.shared: SharedExpert | None = None
        if model.moe_shared_expert_intermediate_size is not None:
            self.shared = SharedExpert(model, dtype=dtype, tensor_parallel=tensor_parallel)

    def forward(self, hidden: Tensor, context: HasMoE) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        own = split_along(hidden, self._split, dim=_SEQUENCE)
        choice = self.router(own, context.moe, places=self._places(own, context.moe))
        mixed = self._dispatch(own.flatten(0, 1), choice, run=self.experts).view_as(own)
        out = concat_along(mixed, self._split, dim=_SEQUENCE)
        return out if self.shared is None else out + self.shared(hidden)

    def _places(self, own: Tensor, context: MoEContext) -> Tensor:
        """[own S] int64, where this rank's tokens stand in their sequence."""
        length, first = own.shape[_SEQUENCE], own.shape[_SEQUENCE] * self._tp.index
        if context.places is None:
            return torch.arange(first, first + length, device=own.device)
        return context.places[first : first + length]


class SharedExpert(nn.Module):
    """The MLP that every token goes through, beside the experts it chooses."""

    def __init__(self, model: ModelConfig, *, dtype: torch.dtype, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[model.activation]
        hidden, inner = model.hidden_size, model.moe_shared_expert_intermediate_size
        assert inner is not None

        def column() -> ColumnParallelLinear:
            return ColumnParallelLinear(hidden, inner, bias=False, dtype=dtype, tensor_parallel=tensor_parallel)

        self.gate = column() if model.activation is Activation.swiglu else None
        self.up = column()
        self.down = RowParallelLinear(inner, hidden, bias=False, dtype=dtype, tensor_parallel=tensor_parallel)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        if self.gate is None:
            (up,) = column_parallel(hidden, [self.up])
            inner = self.activation(up)
        else:
            gate, up = column_parallel(hidden, [self.gate, self.up])
            inner = self.activation(gate) * up
        out: Tensor = self.down(inner)
        return out


def expert_shape(model: ModelConfig, groups: MoEGroups) -> ExpertShape:
    """What one rank holds of the experts.

    Raises:
        TopologyError: experts that the groups cannot share.
    """
    assert model.num_experts is not None
    inner, ep, etp = moe_ffn_size(model), groups.ep.size, groups.etp.size
    for whole, size, what, flag in (
        (model.num_experts, ep, "experts", "expert-model-parallel-size"),
        (inner, etp, "columns of an expert", "expert-tensor-parallel-size"),
    ):
        if whole % size:
            raise TopologyError(
                f"{whole} {what} cannot be shared by {size} ranks",
                why="every rank holds as many",
                fix=f"set --{flag} to a divisor of {whole}",
            )
    return ExpertShape(
        num_experts=model.num_experts // ep,
        hidden=model.hidden_size,
        inner=inner // etp,
        activation=ACTIVATIONS[model.activation],
        is_gated=model.activation is Activation.swiglu,
    )
