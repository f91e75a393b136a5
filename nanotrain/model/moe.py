"""The mixture-of-experts layer: a router, experts of which each token uses the top k, and an
optional shared expert.

    hidden --+-- local tokens -- router, fc1 -- token dispatcher (experts) -- fc2 -- all tokens
             --+-- out +-- shared expert (a tensor-parallel MLP) ------------------ times its gate
             ----------+

With moe_latent_size experts work in a compressed width, to which fc1 projects and from which fc2
does (LatentMoE of Nemotron 3 Super); without it both are the identity.

Each rank routes tokens of its own. With sequence parallelism its tokens are a slice already.
Without, all tp ranks have the same tokens, so each routes its slice of the sequence and the outputs
are gathered. In generation, where a step may have one token, each routes all of them.

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
from nanotrain.model.parameters import Parameters
from nanotrain.model.router import Router
from nanotrain.parallel.ep.experts import EXPERT_LINEARS, ExpertOptions, Experts
from nanotrain.parallel.ep.token_dispatcher import build_token_dispatcher
from nanotrain.parallel.tp.layers import ColumnParallelLinear, TensorParallel

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
        moe, single = model_config.moe, Group.single_rank("tp")
        assert moe is not None, "a dense layer has no experts"
        self._tp = single if parallel.sequence.size == 1 else parallel.tp.group
        self._split = single if parallel.tp.sequence_parallel else self._tp
        self.router, self.weights_inputs = (
            Router(moe, params, parallel=parallel),
            moe.apply_probs_on_input,
        )
        self._num_experts, self.has_zero_experts = moe.num_experts, moe.num_zero_experts > 0
        options = replace(parallel.dispatch, may_drop=moe.may_drop, recompute=parallel.recompute)
        self.dispatcher = build_token_dispatcher(
            moe.num_experts, ep=parallel.ep, etp=parallel.etp, options=options
        )
        latent = partial(_latent_projection, params, tensor_parallel=parallel.tp.unsharded)
        self.fc1_latent_proj, self.fc2_latent_proj = (
            latent("fc1_latent_proj"),
            latent("fc2_latent_proj"),
        )
        of_experts, num_local = params.submodule("experts"), moe.num_experts // parallel.ep.size
        linears = {
            name: of_experts.linear(name) for name in EXPERT_LINEARS if of_experts.submodule(name)
        }
        experts = ExpertRange(parallel.ep.index * num_local, num_local, moe.num_experts)
        self.experts = Experts(
            linears,
            activation=build_activation(model_config, of_experts),
            options=ExpertOptions(
                may_drop=self.dispatcher.has_padding,
                wgrad_queue=parallel.tp.wgrad_queue,
                experts=experts,
                fp8=expert_fp8_options(
                    parallel.tp.fp8, experts, etp=parallel.etp, sequence=parallel.sequence
                ),
                adds_down_bias=parallel.etp.is_first,
            ),
        )
        self.shared, self.dropout = shared, dropout
        shared_gate = params.get("shared_gate.weight")
        self.shared_gate = None if shared_gate is None else Linear(shared_gate, None)

    @eager
    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        finish = self.start(hidden, context)
        # while tokens travel
        shared = None if self.shared is None else self.shared(hidden, context)
        # a factor of each token, the same on every tp rank
        if shared is not None and self.shared_gate is not None:
            shared = self.shared_gate.fprop(hidden).sigmoid() * shared
        out = finish()
        return self.dropout(out if shared is None else out + shared, context.dropout)

    @eager  # tokens per expert vary between batches, and there are collectives in between
    def start(self, hidden: Tensor, context: LayerContext) -> Callable[[], Tensor]:
        """Send tokens [B, S, H] to their experts; returns a function that waits for the sums of
        their outputs.
        """
        local = split_along(hidden, self._split, dim=_SEQUENCE)
        routing = self.router(local, context, positions=partial(self._positions, local, context))
        tokens = self.fc1_latent_proj(local).flatten(0, 1)
        if self.weights_inputs:  # of one expert, so a token is scaled before it is sent
            tokens = (tokens * routing.topk_weights).to(tokens.dtype)
            routing = replace(routing, topk_weights=torch.ones_like(routing.topk_weights))
        sent = routing.of_experts(self._num_experts) if self.has_zero_experts else routing
        finish_routed = self.dispatcher(tokens, sent, kept=context.dispatch_splits)

        @eager
        def finish() -> Tensor:
            out = finish_routed(self.experts)
            if self.has_zero_experts:  # their outputs are the tokens
                weights = routing.topk_weights.masked_fill(routing.topk_ids < self._num_experts, 0)
                out = out + (weights.sum(-1, keepdim=True) * tokens).to(out.dtype)
            return concat_along(
                self.fc2_latent_proj(out.unflatten(0, local.shape[:2])), self._split, dim=_SEQUENCE
            )

        return finish

    def _positions(self, local: Tensor, context: LayerContext) -> Tensor:
        """[S of this tp rank] int64, the positions of its tokens in their sequence."""
        length, first = local.shape[_SEQUENCE], local.shape[_SEQUENCE] * self._tp.index
        if context.sequence_positions is None:
            return torch.arange(first, first + length, device=local.device)
        return context.sequence_positions[first : first + length]


def _latent_projection(
    params: Parameters, name: str, *, tensor_parallel: TensorParallel
) -> nn.Module:
    """A projection of the tokens of each tp rank; the identity where none is declared."""
    if not params.submodule(name):
        return nn.Identity()
    return ColumnParallelLinear(*params.linear(name), tensor_parallel=tensor_parallel)
