"""An fp8 product that computes SwiGLU in its casts has the bits of the activation, the cast and
the product one after the other.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nanotrain.kernels.fp8.layer import Fp8Layer, Fp8Options
from nanotrain.kernels.fp8.products import fp8_in_graph
from nanotrain.kernels.fp8.swiglu import fuses_swiglu, swiglu_linear
from nanotrain.kernels.linear import Linear
from nanotrain.precision.fp8 import FP8_FORMATS, FP8_RECIPES, RECIPES

T, I, O = 40, 144, 48  # noqa: E741


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def build(recipe: str, **more: object) -> Linear:
    options = replace(Fp8Options(FP8_RECIPES[recipe], FP8_FORMATS["e4m3"]), **more)
    layer = Fp8Layer(options)
    if layer.history is not None:
        layer.update(torch.full((3, 1), 2.0))
    weight = nn.Parameter(draw(O, I, seed=1))
    return Linear(weight, nn.Parameter(draw(O, seed=2)), fp8=layer)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_the_bits_are_those_of_one_step_after_the_other(recipe: str) -> None:
    results = []
    for is_joined in (False, True):
        linear = build(recipe)
        gate = draw(2, T // 2, I, seed=3).requires_grad_()
        up = draw(2, T // 2, I, seed=4).requires_grad_()
        if is_joined:
            out = swiglu_linear(gate, up, linear=linear)
        else:
            (out,) = fp8_in_graph(F.silu(gate) * up, [linear])
        out.backward(draw(2, T // 2, O, seed=5))
        assert linear.fp8 is not None
        amaxes = [] if linear.fp8.step_amax is None else [linear.fp8.step_amax]
        results.append([out, gate.grad, up.grad, linear.weight.grad, linear.bias.grad, *amaxes])
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_a_frozen_weight_has_no_gradient_and_keeps_no_input() -> None:
    linear = build("blockwise")
    linear.weight.requires_grad_(False)
    gate = draw(T, I, seed=3).requires_grad_()
    out = swiglu_linear(gate, gate.detach(), linear=linear)
    assert all(saved.dtype != torch.float8_e4m3fn for saved in out.grad_fn.saved_tensors)
    out.sum().backward()
    assert linear.weight.grad is None and linear.bias.grad is not None and gate.grad is not None


def test_only_the_transposed_input_is_kept_beside_gate_and_up() -> None:
    linear = build("blockwise")
    gate, up = draw(T, I, seed=3).requires_grad_(), draw(T, I, seed=4).requires_grad_()
    out = swiglu_linear(gate, up, linear=linear)
    saved = out.grad_fn.saved_tensors
    wide = [tensor for tensor in saved if tensor.dtype == torch.bfloat16]
    assert [tensor.data_ptr() for tensor in wide] == [gate.data_ptr(), up.data_ptr()]
    assert [tensor.shape for tensor in saved if tensor.dtype == torch.float8_e4m3fn] == [(I, T)]


def test_layers_need_kernels_and_scales_of_one_rank() -> None:
    options = Fp8Options(RECIPES["mxfp8"], FP8_FORMATS["e4m3"], is_fused=True)
    assert fuses_swiglu(options)
    assert fuses_swiglu(replace(options, recipe=RECIPES["delayed"]))
    for recipe in ("tensorwise", "rowwise", "nvfp4"):
        assert not fuses_swiglu(replace(options, recipe=RECIPES[recipe]))
    assert not fuses_swiglu(replace(options, is_fused=False))
    assert not fuses_swiglu(replace(options, wgrad=False))
    assert not fuses_swiglu(None)
    assert not fuses_swiglu(replace(options, reduce_amax=lambda amax: amax))
