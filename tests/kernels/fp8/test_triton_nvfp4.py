"""The casts of Triton kernels are those of torch's operators, to the bit, packed and swizzled.

Run with `pip install nanotrain[triton]` and `TRITON_INTERPRET=1`.
"""

import os

import pytest
import torch

from nanotrain.kernels.fp8 import nvfp4, triton_nvfp4
from nanotrain.kernels.fp8.nvfp4 import Nvfp4, PackedNvfp4
from nanotrain.kernels.fp8.nvfp4_mm import pack_matrix
from nanotrain.kernels.fp8.rounding import ElementWords
from tests.kernels.fp8.test_nvfp4 import ROWS, TILES, draw
from tests.kernels.fp8.triton_interpreter import mend

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

SHAPES = [(128, 64), (40, 208), (150, 48)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def mended(monkeypatch: pytest.MonkeyPatch) -> None:
    mend(monkeypatch)


def assert_same(actual: PackedNvfp4, plain: Nvfp4) -> None:
    expected = pack_matrix(plain)
    assert actual.num_rows == expected.num_rows
    values = [each.values.view(torch.uint8) for each in (actual, expected)]
    assert values[0].shape == values[1].shape
    # a kernel writes -0 where a padded block has it
    assert torch.equal(*values)
    scales = [each.block_scales.view(torch.uint8) for each in (actual, expected)]
    assert torch.equal(*scales)
    assert torch.equal(actual.tensor_scale, expected.tensor_scale)


def words(num_tokens: int) -> ElementWords:
    rows = torch.randint(0, 2**32, (num_tokens,), generator=torch.Generator().manual_seed(1))
    return ElementWords(rows, first_channel=24)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_amaxes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    # sums of eighths are exact in the order of any CPU
    x = ((8 * draw(*shape)).round() / 8).to(dtype)
    assert torch.equal(triton_nvfp4.tensor_amaxes(x), nvfp4.tensor_amaxes(x))
    x[3, 5] = torch.nan
    assert triton_nvfp4.tensor_amaxes(x).isinf().all()
    assert not triton_nvfp4.tensor_amaxes(x[:0]).any()


@pytest.mark.parametrize("is_random", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_casts(shape: tuple[int, int], dtype: torch.dtype, is_random: bool) -> None:
    x = draw(*shape).to(dtype)
    amax, amax_t = nvfp4.tensor_amaxes(x)
    given = words(len(x)) if is_random else None
    actual = triton_nvfp4.cast_rows(x, amax, block=ROWS, words=given)
    assert_same(actual, nvfp4.cast_rows(x, amax, block=ROWS, words=given))
    actual = triton_nvfp4.cast_columns(x, amax_t, words=given)
    assert_same(actual, nvfp4.cast_columns(x, amax_t, words=given))


def test_weights_in_tiles() -> None:
    x = draw(160, 96)
    amax = nvfp4.matrix_amax(x)
    for matrix in (x, x.t()):
        actual = triton_nvfp4.cast_rows(matrix, amax, block=TILES)
        assert_same(actual, nvfp4.cast_rows(matrix, amax, block=TILES))


def test_an_overflow_scales_by_nan() -> None:
    x = draw(16, 64)
    x[2, 3] = torch.inf
    amax, _ = triton_nvfp4.tensor_amaxes(x)
    assert triton_nvfp4.cast_rows(x, amax, block=ROWS).tensor_scale.isnan()


def test_no_tokens() -> None:
    x = draw(4, 64)[:0]
    amax, amax_t = triton_nvfp4.tensor_amaxes(x)
    assert triton_nvfp4.cast_rows(x, amax, block=ROWS).values.numel() == 0
    assert triton_nvfp4.cast_columns(x, amax_t).values.numel() == 0
