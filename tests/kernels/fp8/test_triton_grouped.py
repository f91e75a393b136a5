"""The Triton kernel of all experts' fp8 products in Triton's interpreter, against one product per
expert and fp64.

Run as tests/kernels/test_triton_softmax.py.
"""

import os
from functools import partial

import pytest
import torch

from nanotrain.kernels.fp8.grouped import Fp8GroupedMM, Fp8LoopedMM
from nanotrain.kernels.fp8.layer import ExpertRange, Fp8Layer
from nanotrain.kernels.linear import GradView
from tests.kernels.fp8.test_grouped import COUNTS, E, I, O, results
from tests.kernels.fp8.test_products import draw, options
from tests.kernels.fp8.triton_interpreter import mend

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def mended(monkeypatch: pytest.MonkeyPatch) -> None:
    mend(monkeypatch)


CASES = [
    ("tensorwise", "hybrid", torch.bfloat16, 1),
    ("delayed", "e4m3", torch.float32, 0),
    ("rowwise", "hybrid", torch.float32, 1),
    ("blockwise", "e4m3", torch.float32, 0),
    ("mxfp8", "e4m3", torch.float32, 1),
]


@pytest.mark.parametrize(("recipe", "name", "dtype", "case"), CASES)
def test_one_launch_has_the_products_of_each_expert(
    recipe: str, name: str, dtype: torch.dtype, case: int
) -> None:
    counts, dropped = COUNTS[case]
    both = [
        results(
            gemm,
            counts,
            dropped=dropped,
            dtype=dtype,
            recipe=recipe,
            name=name,
            is_fused=gemm is Fp8GroupedMM,
        )
        for gemm in (Fp8LoopedMM, Fp8GroupedMM)
    ]
    for looped, grouped in zip(*both, strict=True):
        # the order of fp32 sums; with a scale per tensor few values are rounded to another number
        limit = (
            2e-2
            if dtype is torch.bfloat16
            else 5e-3
            if recipe in ("tensorwise", "delayed")
            else 1e-5
        )
        assert grouped.isfinite().all() and (grouped - looped).norm() <= limit * looped.norm()


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
def test_weight_gradients_are_added_in_the_fp32_buffer_without_a_host_sync(recipe: str) -> None:
    counts, _ = COUNTS[0]
    offs = torch.tensor(counts).cumsum(0).to(torch.int32)
    x, grad = draw(sum(counts), I, seed=1).bfloat16(), draw(sum(counts), O, seed=2).bfloat16()
    buffer, weight = torch.full((E, O, I), torch.nan), draw(E, O, I, seed=3).bfloat16()
    for has_grads in (False, True):
        gemm = Fp8GroupedMM(
            Fp8Layer(options(recipe, is_fused=True, keeps_weights=True), ExpertRange(0, E, E))
        )
        view = GradView(
            buffer.dtype, partial(lambda *target: target, buffer, has_grads), lambda: None
        )
        gemm.fprop(x, weight, offs=offs)
        assert gemm.accumulate_wgrad(grad, x, offs=offs, view=view)
    ends = [0, *offs.tolist()]
    for expert, tokens in enumerate(map(slice, ends, ends[1:])):
        exact = 2 * (grad[tokens].double().t() @ x[tokens].double())
        assert (buffer[expert] - exact).norm() <= 0.06 * exact.norm()
