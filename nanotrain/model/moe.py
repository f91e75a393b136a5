"""The mixture-of-experts layer: a router, experts of which each token uses a few, and a shared one that all use.

    hidden --+-- own tokens -- router -- dispatch -- experts -- combine -- all tokens --+-- out
             +-- shared expert (an ordinary tensor-parallel MLP) -----------------------+

Every rank brings tokens of its own to the experts. With sequence parallelism its tokens are its own already; without,
all ranks of tp hold the same ones, so each takes its slice of the sequence and the results are joined again.

    B batch   S tokens of a sequence as the layer gets them   H hidden
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from nanotrain.comm.autograd import concat_along, split_along
from nanotrain.comm.group import Group
from nanotrain.config.config import Activation, ModelConfig
from nanotrain.config.derive import moe_ffn_size
from nanotrain.errors import TopologyError
from nanotrain.model.meta import meta_parameter
from nanotrain.model.mlp import ACTIVATIONS, MLP
from nanotrain.model.parallel import ModelParallel
from nanotrain.model.router import MoEContext, Router
from nanotrain.parallel.ep.experts import Experts
from nanotrain.parallel.ep.token_dispatcher import build_token_dispatcher

_SEQUENCE = 1  # the dim of [B, S, H] that is split over tp


class HasMoE(Protocol):
    """What the layer reads of the context that all layers of a batch share."""

    @property
    def moe(self) -> MoEContext:
        """Of the batch."""


class MoELayer(nn.Module):
    """Stands where an MLP stands, on the meta device.

    Args:
        model_config: the whole model's shape.
        dtype: of the parameters and activations.
        parallel: whom the layer talks to.

    Raises:
        TopologyError: experts that the groups cannot share.
    """

    def __init__(self, model_config: ModelConfig, *, dtype: torch.dtype, parallel: ModelParallel) -> None:
        super().__init__()
        assert model_config.moe.num_experts is not None, "a dense layer has no experts"
        tensor_parallel = parallel.tp
        self._tp = tensor_parallel.group
        self._split = Group.single_rank("tp") if tensor_parallel.sequence_parallel else tensor_parallel.group
        self.router = Router(model_config, dtype=dtype, sequence=parallel.sequence)
        num_experts, inner = expert_shape(model_config, parallel)
        self._dispatcher = build_token_dispatcher(model_config.moe.num_experts, ep=parallel.ep, etp=parallel.etp)
        wide, narrow = (num_experts, inner, model_config.hidden_size), (num_experts, model_config.hidden_size, inner)
        is_gated = model_config.activation is Activation.swiglu
        self.experts = Experts(
            gate=meta_parameter(*wide, dtype=dtype) if is_gated else None,
            up=meta_parameter(*wide, dtype=dtype),
            down=meta_parameter(*narrow, dtype=dtype),
            activation=ACTIVATIONS[model_config.activation],
            may_drop=self._dispatcher.keeps_dropped and model_config.moe.expert_capacity_factor is not None,
            wgrad_queue=tensor_parallel.wgrad_queue,
        )
        self.shared: MLP | None = None
        if model_config.moe.shared_expert_intermediate_size is not None:
            size = model_config.moe.shared_expert_intermediate_size
            self.shared = MLP(model_config, dtype=dtype, tensor_parallel=tensor_parallel, size=size)

    @torch.compiler.disable  # rows per expert differ from batch to batch, and ranks wait for each other in between
    def forward(self, hidden: Tensor, context: HasMoE) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        own = split_along(hidden, self._split, dim=_SEQUENCE)
        routing = self.router(own, context.moe, places=self._places(own, context.moe))
        mixed = self._dispatcher(own.flatten(0, 1), routing, run_experts=self.experts).view_as(own)
        out = concat_along(mixed, self._split, dim=_SEQUENCE)
        return out if self.shared is None else out + self.shared(hidden)

    def _places(self, own: Tensor, context: MoEContext) -> Tensor:
        """[own S] int64, where this rank's tokens stand in their sequence."""
        length, first = own.shape[_SEQUENCE], own.shape[_SEQUENCE] * self._tp.index
        if context.places is None:
            return torch.arange(first, first + length, device=own.device)
        return context.places[first : first + length]


def expert_shape(model_config: ModelConfig, parallel: ModelParallel) -> tuple[int, int]:
    """The number of experts of one rank and their local width.

    Raises:
        TopologyError: experts that the groups cannot share.
    """
    assert model_config.moe.num_experts is not None
    inner, ep, etp = moe_ffn_size(model_config), parallel.ep.size, parallel.etp.size
    for whole, size, what, flag in (
        (model_config.moe.num_experts, ep, "experts", "expert-model-parallel-size"),
        (inner, etp, "columns of an expert", "expert-tensor-parallel-size"),
    ):
        if whole % size:
            raise TopologyError(
                f"{whole} {what} cannot be shared by {size} ranks",
                why="every rank holds as many",
                fix=f"set --{flag} to a divisor of {whole}",
            )
    return model_config.moe.num_experts // ep, inner // etp
