"""MXFP8 by arithmetic: e8m0 scales of 32 elements, rounded up, and the values that follow.

OCP Microscaling Formats 1.0, section 6.3, takes the scale 2^(floor(log2 amax) - 8), with which an
amax above 448 times it is saturated. Transformer Engine and torchao (`RCEIL`) take the smallest
power of two with which the amax fits: so does this package.
"""

import math

import pytest
import torch

from nanotrain.kernels.fp8.quantize import Cast, Quantized, cast
from nanotrain.kernels.fp8.scaled_mm import emulate
from nanotrain.precision.fp8 import RECIPES

RECIPE = RECIPES["mxfp8"]
E4M3 = torch.float8_e4m3fn
HOW = Cast(RECIPE.block, E4M3, RECIPE.power_of_two)


def quantized(x: torch.Tensor) -> Quantized:
    return cast(x, HOW).get()


@pytest.mark.parametrize(
    ("amax", "scale"),
    [
        (448.0, 1.0),
        (448.0 * 2**-20, 2.0**-20),
        (449.0, 2.0),  # the floor rule has 1, and saturates
        (511.0, 2.0),
        (512.0, 2.0),
        (447.9, 1.0),
        (224.5, 1.0),
        (224.0, 0.5),
        (1.0, 2.0**-8),
        (1.76, 2.0**-7),  # 1.75 is 448 / 256
    ],
)
def test_the_scale_is_the_smallest_with_which_the_amax_fits(amax: float, scale: float) -> None:
    x = torch.zeros(1, 64)
    x[0, 5], x[0, 40] = -amax, 1.0
    assert quantized(x).inverse_scales.tolist() == [[scale, 2.0**-8]]
    # the rule of Transformer Engine: the bits of amax / 448 in fp32, the exponent rounded up
    bits = torch.tensor(amax).mul(torch.tensor(1 / 448)).view(torch.int32).item()
    exponent = (bits >> 23) + (bits & 0x7FFFFF > 0)
    assert scale == 2.0 ** (exponent - 127)
    e8m0 = quantized(x).inverse_scales.to(torch.float8_e8m0fnu)
    assert e8m0.view(torch.uint8)[0, 0] == exponent and e8m0.float()[0, 0] == scale


def test_a_block_worked_by_hand() -> None:
    """Amax 900: scale 4, 900 / 4 = 225 is 224 in e4m3; 1 / 4 is exact, 0.01 / 4 is subnormal.

    Below 2^-6 numbers are 2^-9 apart: 0.0025 = 1.28 * 2^-9 is 2^-9. 0.001 / 4 is 0.128 * 2^-9: 0.
    """
    x = torch.zeros(1, 32)
    x[0, :5] = torch.tensor([900.0, 1.0, 0.01, 0.001, -18.0])
    result = quantized(x)
    assert result.values.float()[0, :5].tolist() == [224, 0.25, 2.0**-9, 0, -4.5]
    assert result.dequantize()[0, :5].tolist() == [896, 1, 2.0**-7, 0, -18]


def test_ties_go_to_the_even_mantissa() -> None:
    """With the scale 1, e4m3 has steps of 1 from 8 to 16 and of 2 from 16 to 32."""
    x = torch.full((1, 32), 448.0)
    x[0, :6] = torch.tensor([8.5, 9.5, 10.5, 17.0, 19.0, -21.0])
    assert quantized(x).values.float()[0, :6].tolist() == [8, 10, 10, 16, 20, -20]


def test_every_finite_amax_fits() -> None:
    """Nothing is saturated, and the largest value uses more than half of the range."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 96, generator=generator) * 2.0 ** torch.randint(
        -60, 60, (64, 96), generator=generator
    )
    result = quantized(x)
    blocks = x.abs().unflatten(1, (-1, 32)).amax(-1) / result.inverse_scales
    assert (blocks <= 448).all() and (blocks > 224).all()
    assert math.log2(result.inverse_scales[0, 0]).is_integer()


def test_columns_have_blocks_of_their_own() -> None:
    """A product that sums over rows has other blocks: 32 rows of one column."""
    x = torch.zeros(64, 32)
    x[3, 4], x[40, 4] = 500.0, 3.0
    forms = cast(x, Cast(RECIPE.block, E4M3, power_of_two=True, columns=True))
    rows, columns = forms.get(), forms.get(transposed=True)
    assert rows.inverse_scales.shape == (64, 1) and columns.inverse_scales.shape == (32, 2)
    assert rows.inverse_scales[3] == 2 and columns.inverse_scales[4].tolist() == [2, 2.0**-7]


def test_the_product_of_two_blocks_is_exact() -> None:
    """Powers of two times e4m3 values: all sums of these products are exact in fp32."""
    a, b = torch.zeros(1, 64), torch.zeros(1, 64)
    a[0, 0], a[0, 1], a[0, 33] = 448.0, 2.0, -0.5
    b[0, 0], b[0, 1], b[0, 33] = 1.0, 16.0, 96.0
    product = emulate(quantized(a), quantized(b), dtype=torch.float32)
    assert product.item() == 448 + 32 - 48
