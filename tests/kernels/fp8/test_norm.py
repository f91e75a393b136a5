"""fp8 products that compute an RMSNorm in their casts: which layers may, and what they keep;
test_products_in_graph.py compares bits.
"""

from dataclasses import replace

import pytest
import torch

from nanotrain.kernels.fp8.layer import Fp8Options
from nanotrain.kernels.fp8.norm import NormCast, fuses_norm, norm_linears
from nanotrain.precision.fp8 import FP8_FORMATS, FP8_RECIPES, RECIPES
from tests.kernels.fp8.test_swiglu import I, T, build, draw


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_every_recipe_of_8_bits_may_with_kernels_and_scales_of_one_rank(recipe: str) -> None:
    options = Fp8Options(RECIPES[recipe], FP8_FORMATS["e4m3"], is_fused=True)
    assert fuses_norm(options)
    assert not fuses_norm(replace(options, is_fused=False))
    assert not fuses_norm(replace(options, wgrad=False)), "its product reads the norm in 16 bits"
    assert not fuses_norm(replace(options, reduce_amax=lambda amax: amax))
    assert not fuses_norm(replace(options, recipe=RECIPES["nvfp4"]))
    assert not fuses_norm(None)


@pytest.mark.parametrize("keeps", [False, True])
def test_the_transposed_input_is_kept_or_cast_again(keeps: bool) -> None:
    linear = build("blockwise")
    x = draw(2, T // 2, I, seed=3).requires_grad_()
    weight = draw(I, seed=4).requires_grad_()
    (out,) = norm_linears(x, weight, how=NormCast(1e-5, keeps=keeps), linears=[linear])
    saved = out.grad_fn.saved_tensors
    assert [tensor.data_ptr() for tensor in saved[:2]] == [x.data_ptr(), weight.data_ptr()]
    in_fp8 = [tensor.shape for tensor in saved if tensor.dtype == torch.float8_e4m3fn]
    assert in_fp8 == ([(I, T)] if keeps else [])


def test_frozen_weights_have_no_gradient_and_keep_no_input() -> None:
    linear = build("blockwise")
    linear.weight.requires_grad_(False)
    x = draw(T, I, seed=3).requires_grad_()
    weight = draw(I, seed=4).requires_grad_()
    (out,) = norm_linears(x, weight, how=NormCast(1e-5, keeps=True), linears=[linear])
    assert all(saved.dtype != torch.float8_e4m3fn for saved in out.grad_fn.saved_tensors)
    out.sum().backward()
    assert linear.weight.grad is None
    assert all(leaf.grad is not None for leaf in (x, weight, linear.bias))
