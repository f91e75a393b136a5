"""Experts that a table chooses by the token id (DeepSeek-V4, section 2.1; Roller et al. 2021).

    HashRouter       a router that only weighs the experts of the table
    HashedMoELayer   a mixture of experts with such a router

The table is part of the model and not trained. In a new model it has random distinct experts for
every token, the same on all ranks and in every run.

    B batch   S tokens of a sequence on this rank   V vocabulary   K experts per token
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from nanotrain.config.model import ModelConfig, MoEConfig
from nanotrain.model.context import LayerContext, ModelParallel
from nanotrain.model.moe import MoELayer
from nanotrain.model.parameters import Parameters
from nanotrain.model.router import Router
from nanotrain.parallel.ep.token_dispatcher import Routing

TOKENS_AT_ONCE = 2**13  # tokens whose experts are drawn at once


class HashRouter(Router):
    """A router whose experts are those of the token.

    It has no bias and no balance losses, as what it learns changes no choice.

    Args:
        moe: number of experts, scores.
        params: as of `Router`.
        parallel: as of `Router`.
        norm_epsilon: as of `Router`.
        vocab_size: V.
        layer: index in the model.

    Attributes:
        token_experts: [V, K] fp32 buffer, the experts of every token; in a checkpoint.
    """

    token_experts: Tensor

    def __init__(
        self,
        moe: MoEConfig,
        params: Parameters,
        *,
        parallel: ModelParallel,
        norm_epsilon: float,
        vocab_size: int,
        layer: int,
    ) -> None:
        without_balance = replace(
            moe,
            router_enable_expert_bias=False,
            router_load_balancing_type=["none"],
            aux_loss_coeff=[0.0],
        )
        super().__init__(without_balance, params, parallel=parallel, norm_epsilon=norm_epsilon)
        table = draw_experts(vocab_size, moe, layer=layer)
        self.register_buffer("token_experts", table)

    def choose(
        self,
        logits: Tensor,
        scores: Tensor,
        *,
        context: LayerContext,
        positions: Callable[[], Tensor],
    ) -> Tensor:
        """[B, S, K] int64, the experts of the tokens."""
        assert context.tokens is not None, "a stage passes its tokens on"
        return self.token_experts[context.tokens].long()


def draw_experts(vocab_size: int, moe: MoEConfig, *, layer: int) -> Tensor:
    """[V, K] fp32, random distinct experts for every token."""
    generator = torch.Generator().manual_seed(layer)
    parts = []
    for start in range(0, vocab_size, TOKENS_AT_ONCE):
        number = min(TOKENS_AT_ONCE, vocab_size - start)
        shape = (number, moe.num_experts)
        drawn = torch.rand(shape, generator=generator, device="cpu")
        parts.append(drawn.topk(moe.router_topk, dim=-1).indices)
    return torch.cat(parts).float()


class HashedMoELayer(MoELayer):
    """A mixture of experts whose router is a `HashRouter`."""

    def build_router(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
    ) -> Router:
        """The router; arguments as of the layer."""
        assert model_config.moe is not None and model_config.vocab_size is not None, (
            "a complete model has experts and a vocabulary"
        )
        return HashRouter(
            model_config.moe,
            params,
            parallel=parallel,
            norm_epsilon=model_config.norm_epsilon,
            vocab_size=model_config.vocab_size,
            layer=layer,
        )

    def route(self, local: Tensor, context: LayerContext) -> Routing:
        """Choose the experts of the local tokens [B, S or S/tp, H]."""
        assert context.tokens is not None, "a stage passes its tokens on"
        tokens = context.tokens[:, self.local_tokens(local.shape[1])]
        return super().route(local, replace(context, tokens=tokens))
