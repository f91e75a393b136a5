"""Activation functions against their formulas."""

from typing import get_args

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from nanotrain.config.model import ModelConfig
from nanotrain.config.model_fields import Activation
from nanotrain.model.activations import ACTIVATIONS, LEARNED, XIELU, Glu, swiglu
from nanotrain.model.parameters import Parameters


def test_every_activation_is_its_formula() -> None:
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    formulas = {
        "gelu": F.gelu(x),
        "gelu_tanh": F.gelu(x, approximate="tanh"),
        "swiglu": x * x.sigmoid(),
        "relu": x.clamp(min=0),
        "squared_relu": x.clamp(min=0) ** 2,
        "quick_geglu": x * (1.702 * x).sigmoid(),
        "geglu_tanh": F.gelu(x, approximate="tanh"),
    }
    assert formulas.keys() == ACTIVATIONS.keys() == set(get_args(Activation)) - LEARNED.keys()
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
        torch.autograd.grad(out, (gate, up), grad),
        torch.autograd.grad(expected, (gate, up), grad),
        strict=True,
    ):
        assert torch.equal(computed, autograds)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_xielu_is_that_of_transformers_with_its_gradients_and_keeps_its_input(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(2)
    theirs = transformers.activations.XIELUActivation(0.6, 0.9, dtype=torch.float64)
    ours = XIELU(
        Parameters(
            {
                name: nn.Parameter(weight.detach().to(dtype))
                for name, weight in theirs.named_parameters()
            }
        )
    )
    x = torch.randn(64, 32, dtype=dtype, requires_grad=True)
    exact, grad = x.detach().double().requires_grad_(), torch.randn(64, 32, dtype=dtype)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    ):
        out = ours(x)
    assert sum(tensor.numel() for tensor in kept) == x.numel() + 2
    expected = theirs(exact)
    out.backward(grad)
    expected.backward(grad.double())
    found = [
        (out, expected),
        (x.grad, exact.grad),
        *((getattr(ours, n).grad, p.grad) for n, p in theirs.named_parameters()),
    ]
    rtol = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for ours_, theirs_ in found:
        torch.testing.assert_close(ours_.double(), theirs_.double(), rtol=rtol, atol=rtol)
