"""Quantization to fp8: errors against the bounds of the formats, scales, and what is out of range."""

import pytest
import torch

from nanotrain.kernels.fp8.quantize import Quantized, block_amax, inverse_scales, quantize
from nanotrain.precision.fp8 import FP8_RECIPES, RECIPES, Block

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# half of the distance between two neighbours, relative to the smaller: 2^-(mantissa bits + 1)
RELATIVE_ERROR = {E4M3: 2.0**-4, E5M2: 2.0**-3}
BLOCKS: list[Block] = [(None, None), (1, None), (1, 32), (1, 128), (128, 128)]


def draw(*shape: int, spread: float = 1.0) -> torch.Tensor:
    """Normal values times 10^u, u uniform in +-spread."""
    generator = torch.Generator().manual_seed(sum(shape))
    exponents = (torch.rand(shape, generator=generator) * 2 - 1) * spread
    return torch.randn(shape, generator=generator) * 10**exponents


def cast(
    x: torch.Tensor, block: Block, *, dtype: torch.dtype, power_of_two: bool = False
) -> Quantized:
    inverse = inverse_scales(block_amax(x, block), dtype, power_of_two=power_of_two)
    return quantize(x, inverse, block=block, dtype=dtype)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", [(130, 200), (256, 256), (3, 5)])
def test_every_value_has_the_error_of_its_format(
    block: Block, shape: tuple[int, int], dtype: torch.dtype, power_of_two: bool
) -> None:
    x = draw(*shape)
    quantized = cast(x, block, dtype=dtype, power_of_two=power_of_two)
    assert quantized.values.dtype is dtype
    scale = quantized.dequantize() / quantized.values.float().where(
        quantized.values.float() != 0, torch.inf
    )
    # below the smallest normal value the spacing is constant
    smallest = torch.finfo(dtype).smallest_normal * scale.nan_to_num(posinf=0).max()
    error = (quantized.dequantize() - x).abs()
    assert (error <= (x.abs() * RELATIVE_ERROR[dtype] * (1 + 1e-6)).clamp(min=smallest)).all()


@pytest.mark.parametrize("block", BLOCKS)
def test_the_amax_of_a_block_is_its_largest_value(block: Block) -> None:
    x = draw(130, 200).t()
    amax = block_amax(x, block)
    rows, columns = (size or length for size, length in zip(block, x.shape, strict=True))
    expected = [[part.abs().max() for part in band.split(columns, 1)] for band in x.split(rows)]
    assert torch.equal(amax, torch.tensor(expected))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_largest_value_uses_the_range(dtype: torch.dtype) -> None:
    x = draw(8, 16)
    exact, rounded = (
        cast(x, (None, None), dtype=dtype, power_of_two=flag) for flag in (False, True)
    )
    largest = torch.finfo(dtype).max
    assert exact.values.float().abs().max() == largest
    assert largest / 2 <= rounded.values.float().abs().max() <= largest
    assert rounded.inverse_scales.log2().frac().eq(0).all()
    assert inverse_scales(torch.tensor(8 * largest), dtype, power_of_two=True) == 8, (
        "one that is a power of two stays"
    )


def test_values_out_of_range_are_clamped() -> None:
    x = torch.tensor([[1e6, -1e6, 1.0]])
    for dtype in (E4M3, E5M2):
        values = quantize(x, torch.ones(1, 1), block=(None, None), dtype=dtype).values.float()
        assert values.tolist() == [[torch.finfo(dtype).max, -torch.finfo(dtype).max, 1.0]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("block", BLOCKS)
def test_an_overflow_is_not_hidden(block: Block, value: float) -> None:
    x = draw(140, 140)
    x[3, 4] = value
    assert not cast(x, block, dtype=E4M3).dequantize()[3, 4].isfinite()


@pytest.mark.parametrize("block", BLOCKS)
def test_zeros_and_tiny_values_stay_finite(block: Block) -> None:
    for x in (torch.zeros(4, 8), torch.full((4, 8), 1e-38), torch.zeros(0, 8)):
        assert cast(x, block, dtype=E4M3).dequantize().isfinite().all()


def rms_error(x: torch.Tensor, recipe: str) -> float:
    row = RECIPES[recipe]
    actual = cast(x, row.block, dtype=E4M3, power_of_two=row.power_of_two).dequantize()
    return ((actual - x)[1:, 128:].square().mean() / x[1:, 128:].square().mean()).sqrt().item()


def test_an_outlier_spoils_only_its_block() -> None:
    x = draw(256, 256, spread=0.5)
    x[0, 0] = 1e6
    errors = {name: rms_error(x, name) for name in FP8_RECIPES}
    assert errors["tensorwise"] > 0.5  # nearly all values underflow
    for name in ("rowwise", "blockwise", "mxfp8"):
        assert errors[name] < 0.04


def test_a_channel_of_outliers_needs_blocks() -> None:
    x = draw(256, 256, spread=0.5)
    x[:, 0] = 1e6
    errors = {name: rms_error(x, name) for name in FP8_RECIPES}
    assert errors["rowwise"] > 0.5
    assert errors["blockwise"] < 0.04 and errors["mxfp8"] < 0.04
