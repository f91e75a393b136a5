"""fp8 products on a CUDA device: torch's kernels against the emulation, for the recipes that the
GPU has.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from nanotrain.config.config import Fp8Config
from nanotrain.errors import ConfigError
from nanotrain.kernels.compiler import triton_fault
from nanotrain.kernels.fp8.grouped import select_fp8_gemm
from nanotrain.kernels.fp8.layer import ExpertRange, Fp8Layer, Fp8Options
from nanotrain.kernels.fp8.nvfp4_products import select_linears
from nanotrain.kernels.fp8.products import Fp8Linears
from nanotrain.kernels.fp8.swiglu import swiglu_linear
from nanotrain.kernels.grouped import GroupedOptions, grouped_linear
from nanotrain.kernels.linear import Linear
from nanotrain.precision.fp8 import (
    FORMATS,
    FP8_FORMATS,
    FP8_RECIPES,
    GROUPED_CAPABILITY,
    RECIPES,
    require_fp8,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CASES = [(r, f) for r, row in FP8_RECIPES.items() for f in FP8_FORMATS if f in row.formats]
BF16_ROUNDING = 2.0**-8
IS_FUSED = [False] if not torch.cuda.is_available() or triton_fault() else [False, True]
# casts by torch's operators, and by Triton kernels
FORMS = pytest.mark.parametrize("is_fused", IS_FUSED)


def skip_without_kernels(recipe: str, name: str) -> None:
    try:
        precision = Fp8Config(format=name, recipe=recipe)
        require_fp8(precision, torch.cuda.get_device_capability())
    except ConfigError as error:
        pytest.skip(str(error))


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within the rounding of the result and of tensor cores, which keep about 14 bits of a sum."""
    error = (found.cpu().float() - expected.float()).norm() / expected.float().norm()
    assert error.item() < 2 * BF16_ROUNDING


@pytest.mark.parametrize(("recipe", "name"), CASES)
@pytest.mark.parametrize("tokens", [256, 200, 24])
@FORMS
def test_the_products_are_those_of_the_emulation(
    is_fused: bool, recipe: str, name: str, tokens: int
) -> None:
    skip_without_kernels(recipe, name)
    weight, x, grad = draw(384, 256, seed=1), draw(tokens, 256, seed=2), draw(tokens, 384, seed=3)
    results = []
    for device in ("cpu", "cuda"):
        options = Fp8Options(
            FP8_RECIPES[recipe], FP8_FORMATS[name], is_fused=is_fused and device == "cuda"
        )
        layer = Fp8Layer(options).to(device)
        products = Fp8Linears(
            [Linear(nn.Parameter(weight.to(device)), None, fp8=layer)], records=True
        )
        with torch.no_grad():
            dy = grad.to(device)
            results.append(
                [
                    *products.fprop(x.to(device)),
                    products.dgrad([dy]),
                    *products.wgrad([dy], x.to(device)),
                ]
            )
    for found, expected in zip(results[1], results[0], strict=True):
        assert_near(found, expected)


@pytest.mark.parametrize(("recipe", "name"), [*CASES, ("nvfp4", "e2m1")])
@FORMS
def test_experts_are_those_of_the_emulation(is_fused: bool, recipe: str, name: str) -> None:
    skip_without_kernels(recipe, name)
    counts, results = [40, 0, 129], []
    for device in ("cpu", "cuda"):
        has_grouped_mm = torch.cuda.get_device_capability() == GROUPED_CAPABILITY
        options = Fp8Options(RECIPES[recipe], FORMATS[name], has_grouped_mm=has_grouped_mm)
        options = replace(options, is_fused=is_fused and device == "cuda")
        layer = Fp8Layer(options, ExpertRange(0, 3, 3)).to(device)
        weight, x = (
            nn.Parameter(draw(3, 256, 128, seed=1).to(device)),
            draw(sum(counts), 128, seed=2).to(device),
        )
        x.requires_grad_()
        offs = torch.tensor(counts, device=device).cumsum(0).to(torch.int32)
        out = grouped_linear(x, weight, offs=offs, options=GroupedOptions(select_fp8_gemm(layer)))
        grads = torch.autograd.grad(out, (x, weight), draw(*out.shape, seed=3).to(device))
        results.append([out.detach(), *grads])
    for found, expected in zip(results[1], results[0], strict=True):
        assert_near(found, expected)


@pytest.mark.parametrize("tokens", [64, 200])
@FORMS
def test_nvfp4_is_that_of_the_emulation(is_fused: bool, tokens: int) -> None:
    skip_without_kernels("nvfp4", "e2m1")
    weight, x, grad = draw(384, 256, seed=1), draw(tokens, 256, seed=2), draw(tokens, 384, seed=3)
    results = []
    for device in ("cpu", "cuda"):
        options = Fp8Options(
            RECIPES["nvfp4"], FORMATS["e2m1"], is_fused=is_fused and device == "cuda"
        )
        layer = Fp8Layer(options).to(device)
        linear = Linear(nn.Parameter(weight.to(device)), None, fp8=layer)
        products = select_linears(options)([linear])
        with torch.no_grad():
            dy = grad.to(device)
            outputs = products.fprop(x.to(device))
            grad_x = products.dgrad([dy])
            results.append([*outputs, grad_x, *products.wgrad([dy], x.to(device))])
    for found, expected in zip(results[1], results[0], strict=True):
        assert_near(found, expected)


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
@pytest.mark.skipif(True not in IS_FUSED, reason="needs Triton's kernels")
def test_a_cast_that_computes_swiglu_is_that_of_the_emulation(recipe: str) -> None:
    skip_without_kernels(recipe, "e4m3")
    weight, grad = draw(256, 384, seed=1), draw(200, 256, seed=4)
    results = []
    for device in ("cpu", "cuda"):
        options = Fp8Options(FP8_RECIPES[recipe], FP8_FORMATS["e4m3"], is_fused=device == "cuda")
        layer = Fp8Layer(options).to(device)
        linear = Linear(nn.Parameter(weight.to(device)), None, fp8=layer)
        gate, up = (draw(200, 384, seed=seed).to(device).requires_grad_() for seed in (2, 3))
        out = swiglu_linear(gate, up, linear=linear)
        grads = torch.autograd.grad(out, (gate, up, linear.weight), grad.to(device))
        results.append([out.detach(), *grads])
    for found, expected in zip(results[1], results[0], strict=True):
        error = (found.cpu().float() - expected.float()).norm() / expected.float().norm()
        # the activation is rounded once here, and twice by torch: few values of fp8 differ
        assert error.item() < 2e-2
