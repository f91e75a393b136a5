"""Elementwise activation functions of the MLP and the experts: `ACTIVATIONS`, and `Glu` for gated ones."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from nanotrain.config.config import Activation, ModelConfig
from nanotrain.kernels.swiglu import swiglu


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2 (So et al. 2021, "Primer")."""
    return F.relu(x).square()


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x) (Hendrycks and Gimpel 2016), by the fused SiLU, which keeps its input only."""
    return F.silu(1.702 * x) * (1 / 1.702)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.gelu: F.gelu,
    Activation.gelu_tanh: partial(F.gelu, approximate="tanh"),
    Activation.swiglu: F.silu,
    Activation.squared_relu: squared_relu,
    Activation.quick_geglu: quick_gelu,
    Activation.geglu_tanh: partial(F.gelu, approximate="tanh"),
}


@dataclass(frozen=True)
class Glu:
    """activation(gate) * (up + offset); with a clamp, gate and up are clamped first (gpt-oss)."""

    activation: Callable[[Tensor], Tensor]
    offset: float = 0.0
    clamp: float | None = None  # gate <= clamp, and |up| <= clamp

    @classmethod
    def of(cls, model_config: ModelConfig) -> "Glu":
        """The gated activation of a model."""
        activation = ACTIVATIONS[model_config.activation]
        return cls(activation, model_config.glu_linear_offset, model_config.activation_func_clamp_value)

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate [...], up [...] -> [...]."""
        if self.clamp is not None:
            gate, up = gate.clamp(max=self.clamp), up.clamp(-self.clamp, self.clamp)
        if self.activation is F.silu and not self.offset:
            return swiglu(gate, up)
        return self.activation(gate) * (up + self.offset if self.offset else up)
