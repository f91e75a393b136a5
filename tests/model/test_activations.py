"""Activation functions against their formulas."""

from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from nanotrain.config.model import Activation, ModelConfig
from nanotrain.model.activations import ACTIVATIONS, Glu, swiglu


def test_every_activation_is_its_formula() -> None:
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    formulas = {
        "gelu": F.gelu(x),
        "gelu_tanh": F.gelu(x, approximate="tanh"),
        "swiglu": x * x.sigmoid(),
        "squared_relu": x.clamp(min=0) ** 2,
        "quick_geglu": x * (1.702 * x).sigmoid(),
        "geglu_tanh": F.gelu(x, approximate="tanh"),
    }
    assert formulas.keys() == ACTIVATIONS.keys() == set(get_args(Activation))
    for kind, expected in formulas.items():
        torch.testing.assert_close(ACTIVATIONS[kind](x), expected)


def test_a_gate_is_bounded_from_above_and_the_linear_part_on_both_sides() -> None:
    gate, up = torch.tensor([-9.0, 0.5, 9.0]), torch.tensor([9.0, -9.0, 0.5])
    model = ModelConfig(activation="swiglu", glu_linear_offset=1.0, activation_func_clamp_value=2.0)
    silu = torch.nn.functional.silu
    expected = silu(torch.tensor([-9.0, 0.5, 2.0])) * torch.tensor([3.0, -1.0, 1.5])
    torch.testing.assert_close(Glu.of(model)(gate, up), expected)
    plain = Glu.of(ModelConfig(activation="swiglu"))
    assert torch.equal(plain(gate, up), silu(gate) * up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_is_that_of_autograd_and_keeps_two_tensors(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    gate, up = (torch.randn(5, 33).to(dtype).requires_grad_() for _ in range(2))
    grad = torch.randn(33, 5).to(dtype).t()
    expected = F.silu(gate) * up
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = swiglu(gate, up)
    assert [x.data_ptr() for x in kept] == [gate.data_ptr(), up.data_ptr()]
    assert torch.equal(out, expected)
    for computed, autograds in zip(
        torch.autograd.grad(out, (gate, up), grad), torch.autograd.grad(expected, (gate, up), grad), strict=True
    ):
        assert torch.equal(computed, autograds)
