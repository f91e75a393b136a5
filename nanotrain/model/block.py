"""One transformer block: attention and MLP, each behind a norm and beside a residual."""

from functools import partial

import torch
from torch import Tensor, nn

from nanotrain.config.config import ModelConfig
from nanotrain.config.derive import moe_layers
from nanotrain.model.attention import Attention, Context
from nanotrain.model.latent_attention import LatentAttention
from nanotrain.model.mlp import MLP
from nanotrain.model.moe import MoELayer
from nanotrain.model.norm import build_norm
from nanotrain.model.parallel import ModelParallel


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
        model_config: the whole model's shape.
        index: of the block in the whole model; decides whether it has experts.
        dtype: of the parameters and activations.
        parallel: what its layers talk over.
    """

    def __init__(self, model_config: ModelConfig, index: int, *, dtype: torch.dtype, parallel: ModelParallel) -> None:
        super().__init__()
        norm = partial(build_norm, epsilon=model_config.norm_epsilon, dtype=dtype)
        self.attention_norm = norm(model_config.normalization, model_config.hidden_size)
        attention = LatentAttention if model_config.multi_latent_attention else Attention
        self.attention = attention(model_config, dtype=dtype, parallel=parallel)
        self.mlp_norm = norm(model_config.normalization, model_config.hidden_size)
        has_experts = moe_layers(model_config)[index]
        self.mlp = (
            MoELayer(model_config, dtype=dtype, parallel=parallel)
            if has_experts
            else MLP(model_config, dtype=dtype, tensor_parallel=parallel.tp)
        )

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        """[B, S or S/tp, H] -> the same shape."""
        hidden = hidden + self.attention(self.attention_norm(hidden), context)
        out: Tensor = hidden + self.mlp(self.mlp_norm(hidden), context)
        return out
