"""The mixture-of-experts layer: a router, experts, and an optional shared expert.

    hidden --+-- local tokens -- router, fc1 -- token dispatcher (experts) -- fc2 --+-- out
             +-- shared expert (a tensor-parallel MLP) -- times its gate -----------+

With moe_latent_size experts work in a compressed width: fc1 projects to it and fc2 back (LatentMoE
of Nemotron 3 Super); without it both are the identity.

Each rank routes different tokens. With sequence parallelism they are its slice of the sequence
already. Without, all tp ranks have the same tokens, so each routes a slice of the sequence and the
outputs are gathered. In generation, where a step may have one token, each rank routes all tokens.

    B batch   S tokens of a sequence at the input of the layer   H hidden
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from nanotrain.comm.autograd import concat_along, eager, split_along
from nanotrain.comm.group import Group
from nanotrain.config.model import ModelConfig
from nanotrain.kernels.fp8.layer import ExpertRange, expert_fp8_options
from nanotrain.kernels.linear import Linear
from nanotrain.model.activations import build_activation
from nanotrain.model.context import HiddenDropout, LayerContext, ModelParallel
from nanotrain.model.hash_router import HashRouter
from nanotrain.model.norm import build_norm, build_scale
from nanotrain.model.parameters import Parameters
from nanotrain.model.router import Router
from nanotrain.model.router_sinkhorn import SinkhornRouter
from nanotrain.parallel.ep.dispatchers import build_token_dispatcher
from nanotrain.parallel.ep.experts import EXPERT_LINEARS, ExpertOptions, Experts
from nanotrain.parallel.ep.fp8_dispatch import dispatch_encoding
from nanotrain.parallel.ep.token_dispatcher import Routing
from nanotrain.parallel.tp.layers import ColumnParallelLinear

# by the names of `ModelConfig.router_kind`: __init__(model_config, params, *, parallel, layer)
ROUTERS: dict[str, type[Router]] = {
    "topk": Router,
    "hash": HashRouter,
    "sinkhorn": SinkhornRouter,
}
_SEQUENCE = 1  # the dim of [B, S, H] that is split over tp


class MoELayer(nn.Module):
    """Routed experts and a shared expert; the same interface as `MLP`.

    Args:
        model_config: configuration of the model.
        params: router, experts.up, experts.down; experts.gate, fc1_latent_proj, fc2_latent_proj,
            shared_gate and biases where declared.
        parallel: ep shards the experts, etp their matrices; tp and cp the sequence.
        shared: the shared expert; None without one.
        dropout: dropout of the output.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        params: Parameters,
        *,
        parallel: ModelParallel,
        shared: nn.Module | None,
        dropout: HiddenDropout,
    ) -> None:
        super().__init__()
        moe = model_config.moe
        assert moe is not None, "a dense layer has no experts"
        self._tp = parallel.routing_tp
        self._split = Group.single_rank("tp") if parallel.tp.sequence_parallel else self._tp
        self._num_experts = moe.num_experts
        self.has_zero_experts = moe.num_zero_experts > 0
        self.weights_inputs = moe.apply_probs_on_input
        router = ROUTERS[model_config.router_kind(dropout.layer)]
        self.router = router(model_config, params, parallel=parallel, layer=dropout.layer)
        options = replace(
            parallel.dispatch,
            may_drop=moe.may_drop,
            recompute=parallel.recompute,
            encoding=dispatch_encoding(parallel.tp.fp8),
        )
        self.dispatcher = build_token_dispatcher(
            moe.num_experts, ep=parallel.ep, etp=parallel.etp, options=options
        )
        self.fc1_latent_proj = _build_latent_projection(
            params, "fc1_latent_proj", parallel=parallel
        )
        self.fc2_latent_proj = _build_latent_projection(
            params, "fc2_latent_proj", parallel=parallel
        )
        self.experts = _build_experts(
            model_config,
            params.submodule("experts"),
            parallel=parallel,
            may_drop=self.dispatcher.has_padding,
        )
        self.shared = shared
        self.shared_gate: Linear | None = None
        if "shared_gate.weight" in params:
            self.shared_gate = Linear(params["shared_gate.weight"], None)
        # the identity where none is declared
        own_norm = partial(build_own_norm, model_config)
        self.shared_norm = own_norm(params.submodule("shared_norm"))
        self.shared_post_norm = own_norm(params.submodule("shared_post_norm"))
        self.input_norm = own_norm(params.submodule("input_norm"))
        self.output_norm = own_norm(params.submodule("output_norm"))
        self.post_norm = own_norm(params.submodule("post_norm"))
        self.sum_scale = build_scale(0.5 if moe.shared_expert_average else 1.0)
        self.dropout = dropout

    @eager
    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        finish = self.start(hidden, context)
        if self.shared is None:
            return self.dropout(self.post_norm(finish()), context.dropout)
        # while the tokens are sent
        shared = self.shared_post_norm(self.shared(self.shared_norm(hidden), context))
        if self.shared_gate is not None:
            # a factor of each token, the same on every tp rank
            shared = self.shared_gate.fprop(hidden).sigmoid() * shared
        out = self.sum_scale(self.output_norm(finish()) + shared)
        return self.dropout(self.post_norm(out), context.dropout)

    @eager  # tokens per expert vary between batches, and there are collectives in between
    def start(self, hidden: Tensor, context: LayerContext) -> Callable[[], Tensor]:
        """Send tokens [B, S, H] to their experts.

        Returns:
            a function that waits for the summed outputs of the experts, [B, S, H].
        """
        local = split_along(hidden, self._split, dim=_SEQUENCE)
        routing = self.route(local, context)
        tokens = self.fc1_latent_proj(self.input_norm(local)).flatten(0, 1)
        if self.weights_inputs:
            # top-1 routing: a token is scaled before it is sent to its one expert
            tokens = (tokens * routing.topk_weights).to(tokens.dtype)
            routing = replace(routing, topk_weights=torch.ones_like(routing.topk_weights))
        sent = routing.restrict_to(self._num_experts) if self.has_zero_experts else routing
        finish_routed = self.dispatcher(tokens, sent, kept=context.dispatch_splits)

        @eager
        def finish() -> Tensor:
            out = finish_routed(self.experts)
            if self.has_zero_experts:
                # the output of a zero-computation expert is its token
                weights = routing.topk_weights.masked_fill(routing.topk_ids < self._num_experts, 0)
                out = out + (weights.sum(-1, keepdim=True) * tokens).to(out.dtype)
            out = self.fc2_latent_proj(out.unflatten(0, local.shape[:2]))
            return concat_along(out, self._split, dim=_SEQUENCE)

        return finish

    def route(self, local: Tensor, context: LayerContext) -> Routing:
        """Choose the experts of the local tokens [B, S or S/tp, H]; a CUDA graph may replace it."""
        positions = partial(self._positions, local.shape[_SEQUENCE], context)
        routing: Routing = self.router(local, context, positions=positions)
        return routing

    def _positions(self, length: int, context: LayerContext) -> Tensor:
        """[length] int64, the positions of the local tokens in their sequence."""
        tokens = self.router.local_tokens(length)
        if context.sequence_positions is None:
            device = self.router.weight.device
            return torch.arange(tokens.start, tokens.stop, device=device)
        return context.sequence_positions[tokens]


def build_own_norm(model_config: ModelConfig, params: Parameters) -> nn.Module:
    """A norm of the shared expert or of the routed experts; the identity where none is declared."""
    return build_norm(model_config, params) if params else nn.Identity()


def _build_latent_projection(
    params: Parameters, name: str, *, parallel: ModelParallel
) -> nn.Module:
    """A projection of the local tokens; the identity where none is declared."""
    if not params.submodule(name):
        return nn.Identity()
    return ColumnParallelLinear(*params.linear(name), tensor_parallel=parallel.tp.unsharded)


def _build_experts(
    model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, may_drop: bool
) -> Experts:
    """The local experts.

    Args:
        model_config: number of experts, activation.
        params: up, down; gate and biases where declared.
        parallel: ep shards the experts, etp their matrices.
        may_drop: whether some rows belong to no expert.
    """
    assert model_config.moe is not None
    num_experts = model_config.moe.num_experts
    num_local = num_experts // parallel.ep.size
    first = parallel.ep.index * num_local
    local = ExpertRange(first, num_local, num_experts)
    fp8 = expert_fp8_options(parallel.tp.fp8, local, etp=parallel.etp, sequence=parallel.sequence)
    options = ExpertOptions(
        may_drop=may_drop,
        wgrad_queue=parallel.tp.wgrad_queue,
        experts=local,
        fp8=fp8,
        adds_down_bias=parallel.etp.is_first,
    )
    linears = {name: params.linear(name) for name in EXPERT_LINEARS if params.submodule(name)}
    activation = build_activation(model_config, params)
    return Experts(linears, activation=activation, options=options)
