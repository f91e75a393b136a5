"""One transformer block: attention and MLP, each behind a norm and beside a residual."""

import torch
from torch import Tensor, nn

from nanotrain.config.config import ModelConfig
from nanotrain.model.attention import Attention, Context
from nanotrain.model.mlp import MLP
from nanotrain.model.norm import build_norm


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, model: ModelConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        size, epsilon = model.hidden_size, model.norm_epsilon
        self.attention_norm = build_norm(model.normalization, size, epsilon=epsilon, dtype=dtype)
        self.attention = Attention(model, dtype=dtype)
        self.mlp_norm = build_norm(model.normalization, size, epsilon=epsilon, dtype=dtype)
        self.mlp = MLP(model, dtype=dtype)

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        hidden = hidden + self.attention(self.attention_norm(hidden), context)
        out: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return out
