"""The feed-forward layer: up, activation, down; gated with swiglu.

B batch   S sequence   H hidden   F width inside
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.config.config import Activation, ModelConfig
from nanotrain.config.derive import ffn_size

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.gelu: F.gelu,
    Activation.gelu_tanh: partial(F.gelu, approximate="tanh"),
    Activation.swiglu: F.silu,
}


class MLP(nn.Module):
    """down(activation(up(x))), or down(silu(gate(x)) * up(x)) with swiglu (Shazeer, "GLU variants", 2020)."""

    def __init__(self, model: ModelConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[model.activation]

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=model.add_bias_linear, dtype=dtype, device="meta")

        hidden, inner = model.hidden_size, ffn_size(model)
        self.gate = linear(hidden, inner) if model.activation is Activation.swiglu else None
        self.up = linear(hidden, inner)
        self.down = linear(inner, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        if self.gate is None:
            inner = self.activation(self.up(hidden))
        else:
            inner = self.activation(self.gate(hidden)) * self.up(hidden)
        out: Tensor = self.down(inner)
        return out
