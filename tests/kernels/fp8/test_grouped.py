"""One fp8 product for all experts has the bits of one product per expert, on a device without kernels."""

from functools import partial

import pytest
import torch
from torch import nn

from nanotrain.kernels.fp8.grouped import Fp8GroupedMM, Fp8LoopedMM, select_fp8_gemm
from nanotrain.kernels.fp8.layer import ExpertRange, Fp8Layer
from nanotrain.kernels.grouped import GroupedOptions, grouped_linear
from nanotrain.kernels.linear import GradView
from nanotrain.precision.fp8 import FP8_FORMATS
from tests.kernels.fp8.test_products import draw, options

I, O, E = 48, 80, 4  # noqa: E741
GROUPED = ["tensorwise", "delayed", "rowwise"]
# the last two numbers: with dropped tokens, and without any token of the last expert
COUNTS = [([17, 0, 23, 4], 5), ([16, 1, 31, 0], 0)]


def results(
    gemm: type[Fp8LoopedMM], counts: list[int], *, dropped: int, dtype: torch.dtype, **more: object
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
        out = grouped_linear(x, weight, offs=offs, options=GroupedOptions(gemm(layer), may_drop=True))
        grads = torch.autograd.grad(out, (x, weight), draw(*out.shape, seed=seed + 1).to(dtype))
        actual += [out.detach(), *grads]
        if layer.step_amax is not None:
            actual.append(layer.step_amax.clone())
            layer.update(layer.step_amax.clone())
    return actual


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("counts", "dropped"), COUNTS)
@pytest.mark.parametrize("name", FP8_FORMATS)
@pytest.mark.parametrize("recipe", GROUPED)
def test_one_product_has_the_bits_of_the_loop(
    recipe: str, name: str, counts: list[int], dropped: int, dtype: torch.dtype
) -> None:
    both = [
        results(gemm, counts, dropped=dropped, dtype=dtype, recipe=recipe, name=name)
        for gemm in (Fp8LoopedMM, Fp8GroupedMM)
    ]
    for looped, grouped in zip(*both, strict=True):
        assert looped.isfinite().all() and looped.any()
        assert torch.equal(looped, grouped)


def test_shared_amaxes_and_weight_gradients_without_fp8_are_those_of_the_loop() -> None:
    more = {"reduce_amax": lambda amax: amax * 2, "wgrad": False, "recipe": "tensorwise", "name": "hybrid"}
    both = [results(gemm, COUNTS[0][0], dropped=5, dtype=torch.float32, **more) for gemm in (Fp8LoopedMM, Fp8GroupedMM)]
    assert all(torch.equal(looped, grouped) for looped, grouped in zip(*both, strict=True))


@pytest.mark.parametrize("recipe", GROUPED)
def test_an_overflow_of_one_expert_reaches_its_results_only(recipe: str) -> None:
    layer = Fp8Layer(options(recipe), ExpertRange(0, 2, 2))
    x, weight = draw(8, I, seed=1), draw(2, O, I, seed=2)
    x[0, 0] = torch.nan
    offs = torch.tensor([4, 8], dtype=torch.int32)
    out = Fp8GroupedMM(layer).fprop(x, weight, offs=offs)
    assert not out[0].isfinite().any() and out[4:].isfinite().all()


def test_no_tokens_at_all() -> None:
    gemm, weight = Fp8GroupedMM(Fp8Layer(options("rowwise"), ExpertRange(0, 2, 2))), draw(2, O, I, seed=1)
    offs = torch.zeros(2, dtype=torch.int32)
    assert gemm.fprop(draw(0, I, seed=2), weight, offs=offs).shape == (0, O)
    assert not gemm.wgrad(draw(0, O, seed=2), draw(0, I, seed=3), offs=offs).any()


def test_the_recipe_and_the_device_choose() -> None:
    chosen = {
        recipe: type(select_fp8_gemm(Fp8Layer(options(recipe, has_grouped_mm=True))))
        for recipe in ("rowwise", "blockwise", "mxfp8")
    }
    assert chosen == {"rowwise": Fp8GroupedMM, "blockwise": Fp8LoopedMM, "mxfp8": Fp8LoopedMM}
    assert type(select_fp8_gemm(Fp8Layer(options("rowwise")))) is Fp8LoopedMM, "a GPU without the product"


def test_weight_gradients_without_fp8_are_written_where_they_are_accumulated() -> None:
    counts = COUNTS[1][0]
    offs = torch.tensor(counts).cumsum(0).to(torch.int32)
    grad, x, buffer = draw(sum(counts), O, seed=1), draw(sum(counts), I, seed=2), torch.full((E, O, I), torch.nan)
    for with_fp8 in (False, True):
        gemm = Fp8LoopedMM(Fp8Layer(options("tensorwise", "hybrid", wgrad=with_fp8), ExpertRange(0, E, E)))
        for has_grads in (False, True):
            view = GradView(buffer.dtype, partial(lambda *target: target, buffer, has_grads), lambda: None)
            assert gemm.accumulate_wgrad(grad, x, offs=offs, view=view) != with_fp8
            if not with_fp8:
                expected = (1 + has_grads) * gemm.wgrad(grad, x, offs=offs)
                torch.testing.assert_close(buffer, expected, rtol=1e-6, atol=1e-6)
