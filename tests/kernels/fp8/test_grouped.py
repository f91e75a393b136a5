"""fp8 products of stacked experts by torch's operators, and what compares kernels with them."""

from functools import partial

import pytest
import torch
from torch import nn

from benchmarks.fp8_bytes import Total
from benchmarks.operator_count import OperatorCount
from nanotrain.kernels.fp8.grouped import Fp8GroupedMM, Fp8LoopedMM, select_fp8_gemm
from nanotrain.kernels.fp8.layer import ExpertRange, Fp8Layer
from nanotrain.kernels.grouped import GroupedMM, GroupedOptions, grouped_linear
from nanotrain.kernels.linear import GradView
from nanotrain.precision.fp8 import FP8_RECIPES
from tests.kernels.fp8.test_products import draw, options

I, O, E = 48, 80, 4  # noqa: E741
# the last two numbers: with dropped tokens, and without any token of the last expert
COUNTS = [([17, 0, 23, 4], 5), ([16, 1, 31, 0], 0)]


def results(
    gemm: type[Fp8LoopedMM | Fp8GroupedMM],
    counts: list[int],
    *,
    dropped: int,
    dtype: torch.dtype,
    **more: object,
) -> list[torch.Tensor]:
    """Output and gradients of two microbatches, and the amaxes of the step."""
    offs = torch.tensor(counts).cumsum(0).to(torch.int32)
    layer = Fp8Layer(options(more.pop("recipe"), more.pop("name"), **more), ExpertRange(0, E, E))
    sizes = torch.tensor([1.0, 2.0, 1e3, 1e-2]).view(E, 1, 1)
    weight = nn.Parameter((draw(E, O, I, seed=2) * sizes).to(dtype))
    actual = []
    for seed in (1, 4):
        x = draw(sum(counts) + dropped, I, seed=seed).to(dtype)
        x[sum(counts) :] = torch.inf  # of no expert: not in an amax
        x.requires_grad_()
        out = grouped_linear(
            x, weight, offs=offs, options=GroupedOptions(gemm(layer), may_drop=True)
        )
        grads = torch.autograd.grad(out, (x, weight), draw(*out.shape, seed=seed + 1).to(dtype))
        actual += [out.detach(), *grads]
        if layer.step_amax is not None:
            actual.append(layer.step_amax.clone())
            layer.update(layer.step_amax.clone())
    return actual


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_an_overflow_of_one_expert_reaches_its_results_only(recipe: str) -> None:
    layer = Fp8Layer(options(recipe), ExpertRange(0, 2, 2))
    x, weight = draw(8, I, seed=1), draw(2, O, I, seed=2)
    x[0, 0] = torch.nan
    offs = torch.tensor([4, 8], dtype=torch.int32)
    out = Fp8LoopedMM(layer).fprop(x, weight, offs=offs)
    assert not out[0].isfinite().any() and out[4:].isfinite().all()


def test_no_tokens_at_all() -> None:
    gemm, weight = (
        Fp8LoopedMM(Fp8Layer(options("rowwise"), ExpertRange(0, 2, 2))),
        draw(2, O, I, seed=1),
    )
    offs = torch.zeros(2, dtype=torch.int32)
    assert gemm.fprop(draw(0, I, seed=2), weight, offs=offs).shape == (0, O)
    assert not gemm.wgrad(draw(0, O, seed=2), draw(0, I, seed=3), offs=offs).any()


def test_the_device_chooses() -> None:
    for recipe in FP8_RECIPES:
        chosen = [
            type(select_fp8_gemm(Fp8Layer(options(recipe, is_fused=flag))))
            for flag in (False, True)
        ]
        assert chosen == [Fp8LoopedMM, Fp8GroupedMM]


def count_operators(gemm: GroupedMM, *, device: str) -> int:
    """The number of operators of a grouped layer, forward and backward."""
    offs = torch.arange(2, 66, 2, dtype=torch.int32, device=device)
    x = torch.ones(64, I, device=device, requires_grad=True)
    weight, total = nn.Parameter(torch.ones(32, O, I, device=device)), Total()
    with OperatorCount(total, times=1):
        grouped_linear(x, weight, offs=offs, options=GroupedOptions(gemm)).sum().backward()
    return total.launches


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_operators_are_few_and_the_host_waits_for_none(recipe: str) -> None:
    """The meta device has no values to wait for."""
    found = options(recipe, is_fused=True)
    layer = Fp8Layer(found, ExpertRange(0, 32, 32)).to("meta")
    assert count_operators(Fp8GroupedMM(layer), device="meta") < 100
    if recipe == "blockwise":
        looped = Fp8LoopedMM(Fp8Layer(options(recipe), ExpertRange(0, 32, 32)))
        assert count_operators(looped, device="cpu") > 4000


def test_weight_gradients_without_fp8_are_written_where_they_are_accumulated() -> None:
    counts = COUNTS[1][0]
    offs = torch.tensor(counts).cumsum(0).to(torch.int32)
    grad, x, buffer = (
        draw(sum(counts), O, seed=1),
        draw(sum(counts), I, seed=2),
        torch.full((E, O, I), torch.nan),
    )
    for with_fp8 in (False, True):
        gemm = Fp8LoopedMM(
            Fp8Layer(options("tensorwise", "hybrid", wgrad=with_fp8), ExpertRange(0, E, E))
        )
        for has_grads in (False, True):
            view = GradView(
                buffer.dtype, partial(lambda *target: target, buffer, has_grads), lambda: None
            )
            assert gemm.accumulate_wgrad(grad, x, offs=offs, view=view) != with_fp8
            if not with_fp8:
                expected = (1 + has_grads) * gemm.wgrad(grad, x, offs=offs)
                torch.testing.assert_close(buffer, expected, rtol=1e-6, atol=1e-6)
