"""NVFP4 products of all experts at once in Triton's interpreter, against one product per expert.

Run with `pip install nanotrain[triton]` and `TRITON_INTERPRET=1`.
"""

import os

import pytest
import torch
from torch import nn

from nanotrain.kernels.fp8.layer import ExpertRange, Fp8Layer, Fp8Options
from nanotrain.kernels.fp8.nvfp4_products import Nvfp4LoopedMM
from nanotrain.kernels.grouped import GroupedOptions, grouped_linear
from nanotrain.kernels.linear import GradView
from nanotrain.precision.fp8 import FORMATS, RECIPES
from tests.kernels.fp8.test_nvfp4 import draw
from tests.kernels.fp8.triton_interpreter import mend

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from nanotrain.kernels.fp8.nvfp4_grouped import Nvfp4GroupedMM
from tests.kernels.fp8.test_triton_nvfp4_experts import COUNTS, OFFS, E, I, O, T


@pytest.fixture(autouse=True)
def mended(monkeypatch: pytest.MonkeyPatch) -> None:
    mend(monkeypatch)


def results(gemm: type, *, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output and gradients of a grouped layer."""
    options = Fp8Options(RECIPES["nvfp4"], FORMATS["e2m1"])
    layer = Fp8Layer(options, ExpertRange(0, E, E))
    weight = nn.Parameter(draw(E, O, I, seed=2).to(dtype))
    x = draw(T, I, seed=1).to(dtype)
    x[OFFS[-1] :] = torch.inf
    x.requires_grad_()
    grouped_options = GroupedOptions(gemm(layer), may_drop=True)
    out = grouped_linear(x, weight, offs=OFFS, options=grouped_options)
    grads = torch.autograd.grad(out, (x, weight), draw(*out.shape, seed=3).to(dtype))
    return [out.detach(), *grads]


def test_one_launch_has_the_products_of_each_expert() -> None:
    """In fp32, in which only the order of sums differs; amaxes of the transform may."""
    both = [results(gemm, dtype=torch.float32) for gemm in (Nvfp4LoopedMM, Nvfp4GroupedMM)]
    for looped, grouped in zip(*both, strict=True):
        assert grouped.isfinite().all()
        torch.testing.assert_close(grouped, looped, rtol=1e-5, atol=1e-5 * looped.abs().max())
    assert not both[1][2][1].any(), "an expert without tokens has no gradient"


def test_weight_gradients_are_added_where_they_are_accumulated() -> None:
    layer = Fp8Layer(Fp8Options(RECIPES["nvfp4"], FORMATS["e2m1"]), ExpertRange(0, E, E))
    x, grad = draw(T, I, seed=1), draw(T, O, seed=2)
    buffer = torch.full((E, O, I), 2.0)
    view = GradView(buffer.dtype, lambda: (buffer, True), lambda: None)
    gemm = Nvfp4GroupedMM(layer)
    gemm.fprop(x, draw(E, O, I, seed=3), offs=OFFS)
    assert gemm.accumulate_wgrad(grad, x, offs=OFFS, view=view)
    torch.testing.assert_close(buffer, 2 + gemm.wgrad(grad, x, offs=OFFS))


def test_an_overflow_of_one_expert_reaches_its_results_only() -> None:
    layer = Fp8Layer(Fp8Options(RECIPES["nvfp4"], FORMATS["e2m1"]), ExpertRange(0, E, E))
    x = draw(T, I, seed=1)
    x[0, 0] = torch.nan
    out = Nvfp4GroupedMM(layer).fprop(x, draw(E, O, I, seed=2), offs=OFFS)
    assert out[: COUNTS[0]].isnan().all()
    assert out[COUNTS[0] : OFFS[-1]].isfinite().all()


def test_no_tokens_at_all() -> None:
    layer = Fp8Layer(Fp8Options(RECIPES["nvfp4"], FORMATS["e2m1"]), ExpertRange(0, E, E))
    offs = torch.zeros(E, dtype=torch.int32)
    gemm = Nvfp4GroupedMM(layer)
    assert gemm.fprop(draw(0, I), draw(E, O, I, seed=1), offs=offs).shape == (0, O)
    assert not gemm.wgrad(draw(0, O), draw(0, I), offs=offs).any()
