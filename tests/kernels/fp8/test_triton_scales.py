"""Scales of casts in Triton's interpreter: those of torch's operators, stored where products read
them.

Run as tests/kernels/test_triton_softmax.py.
"""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from nanotrain.kernels.fp8.quantize import inverse_scales  # noqa: E402
from nanotrain.kernels.fp8.scaled_mm import swizzle_32_4_4  # noqa: E402
from nanotrain.kernels.fp8.triton_scales import (  # noqa: E402
    Target,
    exponent,
    inverse_scale,
    store_words,
)
from nanotrain.kernels.fp8.triton_tiles import How  # noqa: E402

AMAXES = [0.0, 1e-38, 0.3, 448.0, 449.0, 3e38, float("inf")]


@triton.jit
def record_scales(amaxes, out, exponents, how, size: tl.constexpr):
    index = tl.arange(0, size)
    inverse = inverse_scale(tl.load(amaxes + index), how)
    tl.store(out + index, inverse)
    tl.store(exponents + index, exponent(inverse))


@pytest.mark.parametrize("power_of_two", [False, True])
def test_scales_are_those_of_torch(power_of_two: bool) -> None:
    amaxes = torch.tensor([*AMAXES, 1.0])
    out = torch.empty(8)
    exponents = torch.empty(8, dtype=torch.int32)
    how = How(1, power_of_two=power_of_two, largest=448.0).constants()
    record_scales[(1,)](amaxes, out, exponents, how, size=8)
    expected = inverse_scales(amaxes, torch.float8_e4m3fn, power_of_two=power_of_two)
    assert torch.equal(out.nan_to_num(-1), expected.nan_to_num(-1))
    assert exponents[6] == 255, "NaN in e8m0"
    if power_of_two:
        assert torch.equal(2.0 ** (exponents[:6] - 127), expected[:6])


@triton.jit
def record_words(target, words, groups, how):
    lines = tl.arange(0, how.tile)
    expert = tl.full([], 1, tl.int64)
    start = tl.program_id(0) * how.tile
    where = expert, True, lines < 100, start, how.tile, groups
    store_words(target, lines, tl.load(words + start + lines), where, how)


@pytest.mark.parametrize("swizzles", [False, True])
def test_words_have_the_scales_of_four_blocks(swizzles: bool) -> None:
    """In rows of the second expert, or in the order of cuBLAS."""
    scales = torch.arange(100 * 8).view(100, 8).to(torch.uint8)
    words = torch.zeros(2, 128, 4, dtype=torch.uint8)
    words[:, :100] = scales.view(100, 2, 4).transpose(0, 1)
    stored = torch.zeros(2, 128, 8, dtype=torch.uint8)
    target = Target(stored, stored, None, 0, 0, 128 * 8, 8, 1, 0, 0)
    how = How(1, block=32, swizzles=swizzles).constants()
    record_words[(2,)](target, words.view(torch.int32), 2, how)
    if swizzles:
        assert torch.equal(stored.flatten()[:1024], swizzle_32_4_4(scales))
    else:
        assert torch.equal(stored[1, :100], scales) and not stored[0].any()
