"""Activation functions of the MLP and the experts, elementwise: `ACTIVATIONS`."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from nanotrain.config.config import Activation


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
