"""fp8 products of linear layers against fp64, dense and grouped, with the scales that they share."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from nanotrain.kernels.deferred_wgrad import WgradQueue, accumulate_wgrads
from nanotrain.kernels.fp8.grouped import Fp8GroupedMM, Fp8LoopedMM
from nanotrain.kernels.fp8.layer import ExpertRange, Fp8Layer, Fp8Options, Operand
from nanotrain.kernels.fp8.products import Fp8Linears
from nanotrain.kernels.fp8.quantize import Quantized
from nanotrain.kernels.grouped import GroupedOptions, grouped_linear
from nanotrain.kernels.linear import Linear, Linears
from nanotrain.parallel.tp.layers import ColumnParallelLinear, TensorParallel, column_parallel
from nanotrain.precision.fp8 import FP8_FORMATS, FP8_RECIPES

T, I, O, E = 40, 144, 48, 3  # noqa: E741
# Two independent errors per product of values, uniform up to 2^-4 (e4m3) or 2^-3 (e5m2) of the
# larger neighbour: about 2.6 % and 5.2 % of it rms, less in a sum with terms of both signs.
TOLERANCE = {"e4m3": 0.045, "hybrid": 0.07}


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def options(recipe: str, name: str = "e4m3", **more: object) -> Fp8Options:
    return replace(Fp8Options(FP8_RECIPES[recipe], FP8_FORMATS[name]), **more)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", FP8_FORMATS)
@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_products_are_those_of_fp64(recipe: str, name: str, dtype: torch.dtype) -> None:
    weights = [nn.Parameter(draw(O, I, seed=seed).to(dtype)) for seed in (1, 2)]
    bias = nn.Parameter(draw(O, seed=3).to(dtype))
    linears = [
        Linear(w, b, fp8=Fp8Layer(options(recipe, name)))
        for w, b in zip(weights, (bias, None), strict=True)
    ]
    x, grads = draw(T, I, seed=4).to(dtype), [draw(T, O, seed=seed).to(dtype) for seed in (5, 6)]
    products = Fp8Linears(linears, records=True)

    outputs = products.fprop(x.view(2, -1, I))
    grad_x, actual = products.dgrad(grads), products.wgrad(grads, x)

    wide = [
        Linear(nn.Parameter(w.double()), None if b is None else b.double())
        for w, b in zip(weights, (bias, None), strict=True)
    ]
    expected, wide_grads = Linears(wide), [grad.double() for grad in grads]
    for out, reference in zip(outputs, expected.fprop(x.double()), strict=True):
        assert out.dtype is dtype and out.shape == (2, T // 2, O)
        assert relative(out.flatten(0, 1), reference) < TOLERANCE["e4m3"]
    assert grad_x.dtype is dtype
    assert relative(grad_x, expected.dgrad(wide_grads)) < TOLERANCE[name]
    first, found_bias, second = actual
    assert torch.equal(found_bias, grads[0].sum(0))
    for weight_grad, grad in ((first, wide_grads[0]), (second, wide_grads[1])):
        assert weight_grad.dtype is dtype
        assert 0.001 < relative(weight_grad, grad.t() @ x.double()) < TOLERANCE[name]


def test_products_of_the_forward_alone_accumulate_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """In dense layers, and in each way of the products of experts."""
    fast: list[bool] = []

    def record(a, b, *args, dtype, is_fast=False, **_):
        fast.append(is_fast)
        return torch.zeros(len(a.values), len(b.values), dtype=dtype)

    monkeypatch.setattr("nanotrain.kernels.fp8.products.scaled_mm", record)
    monkeypatch.setattr("nanotrain.kernels.fp8.grouped.scaled_mm", record)
    layer = Fp8Layer(options("tensorwise"))
    products = Fp8Linears([Linear(nn.Parameter(draw(O, I, seed=1)), None, fp8=layer)], records=True)
    x, grad = draw(T, I, seed=2), draw(T, O, seed=3)
    products.fprop(x), products.dgrad([grad]), products.wgrad([grad], x)
    assert fast == [True, False, False]
    gemm = Fp8LoopedMM(Fp8Layer(options("tensorwise"), ExpertRange(0, 1, 1)))
    weight, offs = draw(1, O, I, seed=4), torch.tensor([T], dtype=torch.int32)
    fast.clear()
    gemm.fprop(x, weight, offs=offs), gemm.dgrad(grad, weight, offs=offs)
    gemm.wgrad(grad, x, offs=offs)
    assert fast == [True, False, False]
    monkeypatch.setattr(
        "nanotrain.kernels.fp8.grouped.grouped_by_torch",
        lambda a, b, *, offs, sums, is_fast: fast.append(is_fast) or torch.zeros(1),
    )
    grouped = Fp8GroupedMM(Fp8Layer(options("tensorwise", has_grouped_mm=True)))
    for is_fast in (True, False):
        matrix = Quantized(
            torch.zeros(16, 16).to(torch.float8_e4m3fn), torch.ones(1, 1), (None, None)
        )
        grouped._multiply((matrix, matrix), offs, dtype=torch.bfloat16, is_fast=is_fast)
    assert fast[3:] == [True, False]


def test_weight_gradients_stay_in_the_dtype_of_the_activations_where_asked_for() -> None:
    linear = Linear(
        nn.Parameter(draw(O, I, seed=1)), None, fp8=Fp8Layer(options("tensorwise", wgrad=False))
    )
    x, grad = draw(T, I, seed=2), draw(T, O, seed=3)
    (actual,) = Fp8Linears([linear], records=False).wgrad([grad], x)
    assert torch.equal(actual, grad.t() @ x)


def test_a_microbatch_shares_its_amaxes_once_per_direction() -> None:
    shapes: list[tuple[int, ...]] = []

    def reduce(amax: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(amax.shape))
        return amax * 2

    linears = [
        Linear(
            nn.Parameter(draw(O, I, seed=seed)),
            None,
            fp8=Fp8Layer(options("tensorwise", reduce_amax=reduce)),
        )
        for seed in (1, 2)
    ]
    products, x, grads = (
        Fp8Linears(linears, records=False),
        draw(T, I, seed=3),
        [draw(T, O, seed=4)] * 2,
    )
    products.fprop(x)
    products.dgrad(grads)
    products.wgrad(grads, x)
    assert shapes == [(4, 1), (2, 1)]  # the input for each layer and two weights; two gradients
    doubled = products._scales.quantize(x, Operand.INPUT)
    assert doubled.inverse_scales.item() == pytest.approx(2 * x.abs().max().item() / 448)


def test_gradients_stay_finite_where_delayed_scales_overflow() -> None:
    layer = Fp8Layer(options("delayed", "hybrid"))
    layer.update(torch.full((3, 1), 1e-3))
    linear = Linear(nn.Parameter(draw(O, I, seed=1)), None, fp8=layer)
    products, x, grad = (
        Fp8Linears([linear], records=True),
        draw(T, I, seed=2) * 100,
        draw(T, O, seed=3) * 100,
    )
    outputs = [*products.fprop(x), products.dgrad([grad]), *products.wgrad([grad], x)]
    assert all(out.isfinite().all() for out in outputs)
    # every value was clamped to its last amax
    assert outputs[0].abs().max() < 1e-3 * 1e-3 * I * 1.01


def test_an_overflow_of_the_input_reaches_the_output() -> None:
    layer = Fp8Layer(options("delayed"))
    layer.update(torch.ones(3, 1))
    x = draw(T, I, seed=2)
    x[0, 0] = float("inf")
    (out,) = Fp8Linears(
        [Linear(nn.Parameter(draw(O, I, seed=1)), None, fp8=layer)], records=True
    ).fprop(x)
    assert not out.isfinite().all()


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_each_expert_has_the_products_of_a_linear_layer(recipe: str) -> None:
    counts, dropped = [17, 0, 23], 5
    offs = torch.tensor(counts).cumsum(0).to(torch.int32)
    x = draw(sum(counts) + dropped, I, seed=1).requires_grad_()
    weight = nn.Parameter(draw(E, O, I, seed=2) * torch.tensor([1.0, 2.0, 1e3]).view(E, 1, 1))
    layer = Fp8Layer(options(recipe), ExpertRange(0, E, E))
    out = grouped_linear(
        x, weight, offs=offs, options=GroupedOptions(Fp8LoopedMM(layer), may_drop=True)
    )
    grad = draw(*out.shape, seed=3)
    grad_x, grad_weight = torch.autograd.grad(out, (x, weight), grad)

    assert not out[sum(counts) :].any() and not grad_x[sum(counts) :].any()
    assert not grad_weight[1].any()
    for expert, tokens in ((0, slice(0, 17)), (2, slice(17, 40))):
        linear = Linear(
            nn.Parameter(weight[expert].detach().clone()), None, fp8=Fp8Layer(options(recipe))
        )
        products = Fp8Linears([linear], records=False)
        (expected,) = products.fprop(x[tokens].detach())
        torch.testing.assert_close(out[tokens], expected)
        torch.testing.assert_close(grad_x[tokens], products.dgrad([grad[tokens]]))
        torch.testing.assert_close(
            grad_weight[expert], products.wgrad([grad[tokens]], x[tokens].detach())[0]
        )


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "mxfp8"])
def test_deferred_weight_gradients_are_bit_equal(recipe: str) -> None:
    def grads(queue: WgradQueue | None) -> list[torch.Tensor]:
        layer = Fp8Layer(options(recipe, "hybrid"))
        parallel = replace(TensorParallel.single_rank(), wgrad_queue=queue, fp8=layer.options)
        weights = [nn.Parameter(draw(O, I, seed=seed)) for seed in (1, 2)]
        layers = [
            ColumnParallelLinear(weight, None, tensor_parallel=parallel) for weight in weights
        ]
        x = draw(2, T // 2, I, seed=3).requires_grad_()
        loss = sum(out.square().sum() for out in column_parallel(x, layers))
        if queue is None:
            loss.backward()
        else:
            with queue.defer():
                (x.grad,) = torch.autograd.grad(loss, [x])
            assert all(weight.grad is None for weight in weights)
            accumulate_wgrads(queue.take())
        return [tensor.grad for tensor in (x, *weights) if tensor.grad is not None]

    assert len(grads(None)) == 3
    for immediate, deferred in zip(grads(None), grads(WgradQueue()), strict=True):
        assert torch.equal(immediate, deferred)


def test_evaluation_does_not_count_for_the_history() -> None:
    layer = ColumnParallelLinear(
        nn.Parameter(draw(O, I, seed=1)),
        None,
        tensor_parallel=replace(TensorParallel.single_rank(), fp8=options("delayed")),
    )
    assert layer.fp8 is not None and layer.fp8.step_amax is not None
    with torch.no_grad():
        layer(draw(1, T, I, seed=2))
    assert not layer.fp8.step_amax.any()
    layer(draw(1, T, I, seed=2))
    assert layer.fp8.step_amax[Operand.INPUT].item() == draw(1, T, I, seed=2).abs().max()
