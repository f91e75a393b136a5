"""Activation functions against their formulas."""

import torch
import torch.nn.functional as F

from nanotrain.config.config import Activation, ModelConfig
from nanotrain.model.activations import ACTIVATIONS, Glu


def test_every_activation_is_its_formula() -> None:
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    formulas = {
        Activation.gelu: F.gelu(x),
        Activation.gelu_tanh: F.gelu(x, approximate="tanh"),
        Activation.swiglu: x * x.sigmoid(),
        Activation.squared_relu: x.clamp(min=0) ** 2,
        Activation.quick_geglu: x * (1.702 * x).sigmoid(),
        Activation.geglu_tanh: F.gelu(x, approximate="tanh"),
    }
    assert formulas.keys() == ACTIVATIONS.keys() == set(Activation)
    for kind, expected in formulas.items():
        torch.testing.assert_close(ACTIVATIONS[kind](x), expected)


def test_a_gate_is_bounded_from_above_and_the_linear_part_on_both_sides() -> None:
    gate, up = torch.tensor([-9.0, 0.5, 9.0]), torch.tensor([9.0, -9.0, 0.5])
    model = ModelConfig(activation=Activation.swiglu, glu_linear_offset=1.0, activation_func_clamp_value=2.0)
    silu = torch.nn.functional.silu
    expected = silu(torch.tensor([-9.0, 0.5, 2.0])) * torch.tensor([3.0, -1.0, 1.5])
    torch.testing.assert_close(Glu.of(model)(gate, up), expected)
    plain = Glu.of(ModelConfig(activation=Activation.swiglu))
    assert torch.equal(plain(gate, up), silu(gate) * up)
