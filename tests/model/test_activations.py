"""Activation functions against their formulas."""

import torch
import torch.nn.functional as F

from nanotrain.config.config import Activation
from nanotrain.model.activations import ACTIVATIONS


def test_every_activation_is_its_formula() -> None:
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    formulas = {
        Activation.gelu: F.gelu(x),
        Activation.gelu_tanh: F.gelu(x, approximate="tanh"),
        Activation.swiglu: x * x.sigmoid(),
        Activation.squared_relu: x.clamp(min=0) ** 2,
        Activation.quick_geglu: x * (1.702 * x).sigmoid(),
    }
    assert formulas.keys() == ACTIVATIONS.keys() == set(Activation)
    for kind, expected in formulas.items():
        torch.testing.assert_close(ACTIVATIONS[kind](x), expected)
