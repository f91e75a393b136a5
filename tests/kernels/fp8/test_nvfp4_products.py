"""NVFP4 products against fp64, and the rules of the recipe: who is rounded at random, and where."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from nanotrain.kernels.fp8 import nvfp4
from nanotrain.kernels.fp8.grouped import select_fp8_gemm
from nanotrain.kernels.fp8.layer import ExpertRange, Fp8Layer, Fp8Options
from nanotrain.kernels.fp8.nvfp4_products import Nvfp4Linears, Nvfp4LoopedMM, select_linears
from nanotrain.kernels.fp8.products import Fp8Linears
from nanotrain.kernels.grouped import GroupedOptions, grouped_linear
from nanotrain.kernels.linear import GradView, Linear, Linears, attach
from nanotrain.precision.fp8 import FORMATS, FP8_FORMATS, RECIPES
from tests.kernels.fp8.test_grouped import count_operators

OPTIONS = Fp8Options(RECIPES["nvfp4"], FORMATS["e2m1"])
T, I, O = 40, 64, 48  # noqa: E741


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear(seed: int) -> Linear:
    return Linear(nn.Parameter(draw(O, I, seed=seed)), None, fp8=Fp8Layer(OPTIONS))


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


def test_the_products_are_those_of_fp64() -> None:
    linears = [linear(1), linear(2)]
    x, grads = draw(T, I, seed=4), [draw(T, O, seed=seed) for seed in (5, 6)]
    products = Nvfp4Linears(linears)
    outputs = products.fprop(x.view(2, -1, I))
    grad_x, actual = products.dgrad(grads), products.wgrad(grads, x)
    wide = Linears([Linear(nn.Parameter(each.weight.double()), None) for each in linears])
    wide_grads = [grad.double() for grad in grads]
    for out, expected in zip(outputs, wide.fprop(x.double()), strict=True):
        assert out.shape == (2, T // 2, O) and relative(out.flatten(0, 1), expected) < 0.16
    # stochastic rounding has about twice the variance of rounding to nearest
    assert relative(grad_x, wide.dgrad(wide_grads)) < 0.24
    for weight, expected in zip(actual, wide.wgrad(wide_grads, x.double()), strict=True):
        assert relative(weight, expected) < 0.24


def test_gradients_alone_are_rounded_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    drawn = []
    quantize = nvfp4.quantize_nvfp4

    def record(x, amax, *, block, words=None):
        calls.append((tuple(x.shape), block, words is not None))
        drawn.append(words)
        return quantize(x, amax, block=block, words=words)

    monkeypatch.setattr(nvfp4, "quantize_nvfp4", record)
    products = Nvfp4Linears([linear(1)])
    products.fprop(draw(T, I, seed=2))
    grad = draw(T, O, seed=3)
    products.dgrad([grad])
    products.wgrad([grad], draw(T, I, seed=2))
    padded = 48  # tokens in whole blocks of 16
    assert calls == [
        ((T, I), (1, 16), False),
        ((O, I), (16, 16), False),
        ((T, O), (1, 16), True),
        ((I, O), (16, 16), False),
        ((I, padded), (1, 16), False),
        ((O, padded), (1, 16), True),
    ]
    of_dgrad, of_wgrad = (words for words in drawn if words is not None)
    assert (of_dgrad != of_wgrad[:, :T].t()).all(), "both roundings are independent"


def test_the_transformed_gradient_is_scaled_by_its_own_amax() -> None:
    """Tokens with the signs of the transform become one value of four times their size."""
    signs = torch.tensor(nvfp4.SIGNS).float().repeat(4)
    grad = signs[:, None] * draw(1, O, seed=1)
    x = draw(len(grad), I, seed=2)
    products = Nvfp4Linears([linear(3)])
    products.fprop(x)
    (weight,) = products.wgrad([grad], x)
    assert weight is not None
    assert relative(weight, grad.double().t() @ x.double()) < 0.24


def test_the_mean_over_many_words_has_no_bias() -> None:
    """The gradients of 100 microbatches with other random words."""
    layer = linear(1)
    grad = draw(T, O, seed=3)
    exact = grad.double() @ layer.weight.detach().double()
    total = torch.zeros(T, I)
    for sample in range(100):
        OPTIONS.rounding.start(0, sample_ids=torch.tensor([sample]), positions=torch.arange(T))
        products = Nvfp4Linears([layer])
        products.fprop(draw(T, I, seed=2))
        total += products.dgrad([grad])
    OPTIONS.rounding.tokens = None
    quantized = nvfp4.quantize_nvfp4(
        layer.weight.detach(), layer.weight.detach().abs().max(), block=(16, 16)
    )
    unbiased = grad.double() @ quantized.dequantize().double()
    assert relative(total / 100, unbiased) < 0.04  # of one: 0.14
    assert relative(exact, unbiased) > 0.05


def test_an_outlier_of_one_token_leaves_the_weight_gradient() -> None:
    """By the Hadamard transform: 16 values of the block share it."""
    x, grad = draw(64, I, seed=1), draw(64, O, seed=2)
    x[5] *= 30
    products = Nvfp4Linears([linear(3)])
    products.fprop(x)
    (weight,) = products.wgrad([grad], x)
    assert weight is not None
    assert relative(weight, grad.double().t() @ x.double()) < 0.25


@pytest.mark.parametrize("has_grads", [False, True])
def test_weight_gradients_are_written_where_they_are_accumulated(has_grads: bool) -> None:
    layer = linear(1)
    x, grad = draw(T, I, seed=2), draw(T, O, seed=3)
    plain = Nvfp4Linears([layer])
    plain.fprop(x)
    (expected,) = plain.wgrad([grad], x)
    buffer = torch.full((O, I), 1.0)
    view = GradView(buffer.dtype, lambda: (buffer, has_grads), lambda: None)
    attach(view, layer.weight)
    written = Nvfp4Linears([layer])
    written.fprop(x)
    assert written.wgrad([grad], x) == [None]
    torch.testing.assert_close(buffer, expected + float(has_grads))


def test_each_expert_has_the_products_of_a_linear_layer() -> None:
    counts, dropped = [17, 0, 23], 5
    offs = torch.tensor(counts).cumsum(0).to(torch.int32)
    x = draw(sum(counts) + dropped, I, seed=1).requires_grad_()
    weight = nn.Parameter(draw(3, O, I, seed=2))
    layer = Fp8Layer(OPTIONS, ExpertRange(0, 3, 3))
    gemm = select_fp8_gemm(layer)
    assert isinstance(gemm, Nvfp4LoopedMM)
    out = grouped_linear(x, weight, offs=offs, options=GroupedOptions(gemm, may_drop=True))
    grad = draw(*out.shape, seed=3)
    grad_x, grad_weight = torch.autograd.grad(out, (x, weight), grad)
    assert not out[40:].any() and not grad_x[40:].any() and not grad_weight[1].any()
    for expert, rows in ((0, slice(0, 17)), (2, slice(17, 40))):
        part = x.detach()[rows]
        dense = Linear(nn.Parameter(weight.detach()[expert]), None, fp8=Fp8Layer(OPTIONS))
        (expected,) = Nvfp4Linears([dense]).fprop(part)
        assert torch.equal(out[rows], expected)
        wide = grad[rows].double()
        assert relative(grad_x[rows], wide @ weight.detach()[expert].double()) < 0.24
        assert relative(grad_weight[expert], wide.t() @ part.double()) < 0.24
    buffer = torch.zeros(3, O, I)
    view = GradView(buffer.dtype, partial(lambda: (buffer, False)), lambda: None)
    written = gemm.for_microbatch()
    written.fprop(x.detach(), weight.detach(), offs=offs)
    assert written.accumulate_wgrad(grad, x.detach(), offs=offs, view=view)
    torch.testing.assert_close(buffer, grad_weight)


def test_the_recipe_chooses_the_products() -> None:
    assert select_linears(None) is Linears
    assert select_linears(OPTIONS) is Nvfp4Linears
    assert select_linears(Fp8Options(RECIPES["mxfp8"], FP8_FORMATS["e4m3"])) is Fp8Linears


def test_experts_are_few_operators_where_kernels_run_and_the_host_waits_for_none() -> None:
    """The meta device has no values to wait for."""
    pytest.importorskip("triton")
    options = replace(OPTIONS, is_fused=True)
    gemm = select_fp8_gemm(Fp8Layer(options, ExpertRange(0, 32, 32)).to("meta"))
    assert type(gemm).__name__ == "Nvfp4GroupedMM"
    assert count_operators(gemm, device="meta") < 210  # most are hashes of one word per token
    looped = select_fp8_gemm(Fp8Layer(OPTIONS, ExpertRange(0, 32, 32)))
    assert count_operators(looped, device="cpu") > 4000
