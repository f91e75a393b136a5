"""The bytes that casts to fp8 move per element, as the benchmark counts them."""

import pytest

from benchmarks.fp8_bytes import SIZE, SWIGLU_RECIPES, count_joined, counted, counted_nvfp4
from nanotrain.precision.fp8 import FP8_RECIPES


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_kernels_read_an_operand_once_and_write_it_twice(recipe: str) -> None:
    one, both, torch_forms = (
        counted(recipe, is_fused=is_fused, columns=columns).num_bytes / SIZE**2
        for is_fused, columns in ((True, False), (True, True), (False, True))
    )
    # the amax is that of more than a program reads
    measures_before = recipe in ("tensorwise", "rowwise")
    assert 3 <= one <= (5.1 if measures_before else 3.1) and 4 <= both <= (
        6.1 if measures_before else 4.2
    )
    assert torch_forms > 9 * both


def test_kernels_of_nvfp4_read_for_amaxes_and_once_per_form() -> None:
    """Three reads of bf16, and two writes of 4 bits and a scale per 16: 2 x (1/2 + 1/16) bytes."""
    both = counted_nvfp4(is_fused=True, columns=True).num_bytes / SIZE**2
    assert both == pytest.approx(3 * 2 + 2 * (1 / 2 + 1 / 16), rel=0.01)
    assert counted_nvfp4(is_fused=False, columns=True).num_bytes / SIZE**2 > 50 * both


@pytest.mark.parametrize("recipe", SWIGLU_RECIPES)
def test_a_cast_that_computes_swiglu_moves_half_of_the_bytes(recipe: str) -> None:
    """It reads gate and up and writes two forms; separate steps write and read the product too."""
    separate, joined = count_joined(recipe, is_norm=False)
    assert 12 <= separate <= 12.2
    assert 6 <= joined <= 6.1


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_a_cast_that_computes_a_norm_leaves_out_what_others_write_and_read_again(
    recipe: str,
) -> None:
    separate, joined = count_joined(recipe, is_norm=True)
    if recipe == "rowwise":  # amaxes of rows and of columns, from a read of their own
        assert 14 <= separate <= 14.1
        assert 8 <= joined <= 8.1
    elif recipe == "tensorwise":  # one amax for both casts
        assert 12 <= separate <= 12.1
        assert 8 <= joined <= 8.1
    else:
        assert 10 <= separate <= 10.2
        assert 6 <= joined <= 6.2
