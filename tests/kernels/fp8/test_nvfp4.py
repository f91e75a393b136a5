"""NVFP4 by arithmetic: e2m1 numbers, ties, scales on two levels, transforms and random rounding."""

import math

import pytest
import torch

from nanotrain.kernels.dropout import mix_in
from nanotrain.kernels.fp8.nvfp4 import (
    SIGNS,
    hadamard,
    matrix_amax,
    pad_to_unit,
    quantize_nvfp4,
    round_e2m1,
    tensor_encode_scale,
)

NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
ROWS, TILES = (1, 16), (16, 16)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randn(shape, generator=generator)
    return torch.randn(shape, generator=generator) * exponents.exp()


def test_numbers_of_the_format_stay_and_others_go_to_the_nearest() -> None:
    for sign in (1, -1):
        numbers = sign * torch.tensor(NUMBERS)
        assert torch.equal(round_e2m1(numbers), numbers)
    x = torch.linspace(-7, 7, 2801)
    numbers = torch.tensor([-number for number in NUMBERS] + NUMBERS)
    distance = (x[:, None] - numbers).abs().amin(1)
    torch.testing.assert_close((round_e2m1(x) - x).abs(), distance, rtol=0, atol=1e-6)


def test_a_tie_goes_to_the_even_mantissa() -> None:
    """Codes of e2m1 with the last bit 0: 0, 1, 2, 4."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert round_e2m1(ties).tolist() == [0, 1, 1, 2, 2, 4, 4]


def test_two_blocks_worked_by_hand() -> None:
    """Amax 12 of the tensor: 6 * 448 / 12 = 224 per unit, so amax 12 has the scale 448.

    The second block has the amax 0.8: 0.8 / 6 * 224 = 29.87 is 30 in e4m3. 0.8 becomes 0.8 / (30 /
    224) = 5.97, rounded to 6; its value is 6 * 30 / 224 = 0.8036. 0.3 / (30 / 224) = 2.24 is
    rounded to 2, of the value 0.2679.
    """
    x = torch.zeros(1, 32)
    x[0, :3] = torch.tensor([12.0, -5.0, 1.0])
    x[0, 16:18] = torch.tensor([0.8, -0.3])
    quantized = quantize_nvfp4(x, matrix_amax(x), block=ROWS)
    assert quantized.block_scales.float().tolist() == [[448, 30]]
    assert quantized.values.float()[0, :3].tolist() == [6, -2, 0.5]  # of 6, -2.5, 0.5
    assert quantized.values.float()[0, 16:18].tolist() == [6, -2]
    assert quantized.tensor_scale == torch.tensor(1 / 224)
    expected = [12, -4, 1, 6 * 30 / 224, -2 * 30 / 224]
    actual = quantized.dequantize()[0, [0, 1, 2, 16, 17]]
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-6, atol=0)


def test_a_weight_and_its_transposed_form_have_the_same_values() -> None:
    x = draw(40, 72)  # the last tiles are smaller
    amax = matrix_amax(x)
    quantized = quantize_nvfp4(x, amax, block=TILES)
    transposed = quantize_nvfp4(x.t(), amax, block=TILES)
    assert torch.equal(quantized.dequantize(), transposed.dequantize().t())
    assert (quantized.block_scales[:16] == quantized.block_scales[0]).all()
    # a tile has the scale of its amax
    encode = tensor_encode_scale(amax)
    tile = (x[:16, :16].abs().max() / 6 * encode).to(torch.float8_e4m3fn)
    assert quantized.block_scales[0, 0].float() == tile.float()


@pytest.mark.parametrize("size", [1e-30, 1e-4, 1.0, 1e30])
def test_the_error_is_that_of_the_format(size: float) -> None:
    x = draw(64, 128) * size
    quantized = quantize_nvfp4(x, matrix_amax(x), block=ROWS)
    error = (quantized.dequantize() - x).abs().unflatten(1, (-1, 16))
    amax = x.abs().unflatten(1, (-1, 16)).amax(-1, keepdim=True)
    # half of the largest distance of two numbers, 2 of 6, and a scale that is off by 2^-4
    assert (error <= amax * (1 / 6 + 1 / 16)).all()
    assert error.double().norm() / x.double().norm() < 0.12


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_overflow_is_not_hidden(value: float) -> None:
    x = draw(16, 32)
    x[3, 4] = value
    assert quantize_nvfp4(x, matrix_amax(x), block=ROWS).dequantize().isnan().all()


def test_zeros_and_what_underflows_are_zeros() -> None:
    for x in (torch.zeros(4, 32), torch.zeros(0, 32)):
        quantized = quantize_nvfp4(x, matrix_amax(x), block=ROWS)
        assert torch.equal(quantized.dequantize(), x)
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = 1.0, 2.0**-20  # below 1 / 448 / 2^10: no e4m3 scale
    assert quantize_nvfp4(x, matrix_amax(x), block=ROWS).dequantize()[0, 16] == 0


def test_the_transform_is_orthogonal_and_spreads_an_outlier() -> None:
    x, y = draw(8, 48), draw(5, 48, seed=1)
    product = hadamard(x) @ hadamard(y).t()
    torch.testing.assert_close(product, x @ y.t(), rtol=1e-5, atol=1e-5)
    outlier = torch.zeros(1, 16)
    outlier[0, 3] = 16.0
    assert hadamard(outlier).abs().tolist() == [[4.0] * 16]
    assert sorted(set(SIGNS)) == [-1, 1] and len(SIGNS) == 16
    assert hadamard(x.bfloat16()).dtype is torch.bfloat16
    assert pad_to_unit(torch.ones(2, 17)).sum() == 34 and hadamard(torch.ones(3, 0)).shape == (3, 0)


def test_random_rounding_takes_a_neighbour_and_keeps_the_mean() -> None:
    x = torch.tensor([0.1, 0.5, 1.3, 2.25, 5.5, -3.75])
    words = mix_in(torch.arange(20_000)[:, None], torch.arange(len(x)))
    rounded = round_e2m1(x.expand(len(words), -1), words=words)
    neighbours = [{0, 0.5}, {0.5}, {1, 1.5}, {2, 3}, {4, 6}, {-4, -3}]
    assert [set(column.tolist()) for column in rounded.unbind(1)] == neighbours
    # 5 standard deviations of the mean of values that are at most 2 apart
    torch.testing.assert_close(rounded.mean(0), x, rtol=0, atol=5 * 1 / 20_000**0.5)
    assert torch.equal(round_e2m1(x, words=words[0]), round_e2m1(x, words=words[0]))
