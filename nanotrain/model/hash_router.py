"""Experts that a table chooses by the token id (DeepSeek-V4, section 2.1; Roller et al. 2021).

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
from nanotrain.model.parameters import Parameters
from nanotrain.model.router import Router

TOKENS_AT_ONCE = 2**13  # tokens whose experts are drawn at once


class HashRouter(Router):
    """A router that only weighs the experts of the token.

    It has no bias and no balance losses, as what it learns changes no choice.

    Args:
        model_config: number of experts, scores, vocabulary.
        params: as of `Router`.
        parallel: as of `Router`.
        layer: index in the model; each has a table of its own.

    Attributes:
        token_experts: [V, K] fp32 buffer, the experts of every token; in a checkpoint.
    """

    token_experts: Tensor

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
    ) -> None:
        moe = model_config.moe
        vocab_size = model_config.vocab_size
        assert moe is not None and vocab_size is not None, (
            "a complete model has experts and a vocabulary"
        )
        without_balance = replace(
            moe,
            router_enable_expert_bias=False,
            router_load_balancing_type=["none"],
            aux_loss_coeff=[0.0],
        )
        unbalanced = replace(model_config, moe=without_balance)
        super().__init__(unbalanced, params, parallel=parallel, layer=layer)
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
        tokens = context.tokens[:, self.local_tokens(logits.shape[1])]
        return self.token_experts[tokens].long()


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
