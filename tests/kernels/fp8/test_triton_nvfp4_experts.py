"""NVFP4 kernels of all experts in Triton's interpreter: operands are those of one expert after the
other to the bit, and so are products whose sums are exact.

Run with `pip install nanotrain[triton]` and `TRITON_INTERPRET=1`.
"""

import os

import pytest
import torch

from nanotrain.kernels.fp8 import nvfp4, triton_nvfp4_experts
from nanotrain.kernels.fp8.nvfp4 import Nvfp4, matrix_amax
from nanotrain.kernels.fp8.nvfp4_mm import e2m1_codes, nvfp4_mm
from nanotrain.kernels.fp8.rounding import ElementWords
from nanotrain.kernels.grouped import tokens_of_experts
from tests.kernels.fp8.test_nvfp4 import ROWS, TILES, draw
from tests.kernels.fp8.triton_interpreter import mend

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

E, I, O = 3, 48, 80  # noqa: E741
# with an expert of more than a unit of 256 tokens, one without tokens, and dropped tokens
COUNTS, DROPPED = [17, 0, 275], 5
OFFS = torch.tensor(COUNTS).cumsum(0).to(torch.int32)
EXPERTS = tokens_of_experts(OFFS.tolist())
T = sum(COUNTS) + DROPPED
LINE = triton_nvfp4_experts.LINE_UNIT


@pytest.fixture(autouse=True)
def mended(monkeypatch: pytest.MonkeyPatch) -> None:
    mend(monkeypatch)


def words() -> ElementWords:
    rows = torch.randint(0, 2**32, (T,), generator=torch.Generator().manual_seed(1))
    return ElementWords(rows, first_channel=24)


def assert_same_rows(
    actual: triton_nvfp4_experts.ExpertsNvfp4, lines: slice, expected: Nvfp4, *, first: int = 0
) -> None:
    """Lines of a result from value `first` on, and the matrix of one expert."""
    columns = expected.values.shape[1]
    values = actual.values[lines]
    both = torch.stack([values & 15, values >> 4], dim=-1).flatten(1)
    assert torch.equal(both[:, first : first + columns], e2m1_codes(expected.values))
    scales = actual.block_scales.view(torch.uint8)[lines]
    blocks = expected.block_scales.view(torch.uint8)
    first_block = first // 16
    assert torch.equal(scales[:, first_block : first_block + blocks.shape[1]], blocks)
    padded = -(-columns // LINE) * LINE  # the product reads whole tiles
    assert not (both[:, first + columns : first + padded] & 7).any()
    assert not scales[:, first_block + blocks.shape[1] : first_block + padded // 16].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_amaxes(dtype: torch.dtype) -> None:
    # sums of eighths are exact in the order of any CPU
    x = ((8 * draw(T, I)).round() / 8).to(dtype)
    x[OFFS[-1] :] = torch.inf  # of no expert
    expected = torch.stack([nvfp4.tensor_amaxes(x[tokens]) for tokens in EXPERTS], dim=1)
    assert torch.equal(triton_nvfp4_experts.expert_amaxes(x, OFFS), expected)
    x[20, 5] = torch.nan
    assert triton_nvfp4_experts.expert_amaxes(x, OFFS).isinf().sum(1).tolist() == [1, 1]


@pytest.mark.parametrize(("dtype", "is_random"), [(torch.float32, True), (torch.bfloat16, False)])
def test_casts_of_tokens(dtype: torch.dtype, is_random: bool) -> None:
    x = ((8 * draw(T, I)).round() / 8).to(dtype)  # as above
    amaxes = triton_nvfp4_experts.expert_amaxes(x, OFFS)
    given = words() if is_random else None
    parts = [None] * E if given is None else given.split([*COUNTS, DROPPED])
    rows = triton_nvfp4_experts.cast_tokens(x, amaxes[0], offs=OFFS, words=given)
    columns = triton_nvfp4_experts.cast_channels(x, amaxes[1], offs=OFFS, words=given)
    first = 0
    for expert, tokens in enumerate(EXPERTS):
        if not COUNTS[expert]:
            continue
        plain = nvfp4.cast_rows(x[tokens], amaxes[0, expert], block=ROWS, words=parts[expert])
        assert_same_rows(rows, tokens, plain)
        plain_t = nvfp4.cast_columns(x[tokens], amaxes[1, expert], words=parts[expert])
        assert_same_rows(columns, slice(None), plain_t, first=first)
        assert torch.equal(rows.tensor_scales[expert], plain.tensor_scale)
        first += -(-COUNTS[expert] // LINE) * LINE


def test_casts_of_matrices() -> None:
    weight = draw(E, 40, I)  # rows that are no multiple of 16
    amaxes = torch.stack([matrix_amax(matrix) for matrix in weight])
    for matrices in (weight, weight.mT):
        actual = triton_nvfp4_experts.cast_matrices(matrices, amaxes)
        for expert, matrix in enumerate(matrices):
            lines = slice(expert * len(matrix), (expert + 1) * len(matrix))
            expected = nvfp4.cast_rows(matrix, amaxes[expert], block=TILES)
            assert_same_rows(actual, lines, expected)


def test_products_of_whole_numbers_have_the_bits_of_each_expert() -> None:
    """Sums of a few small numbers are exact in every order."""
    x = draw(T, I, seed=1).sign() * 6
    weight = draw(E, O, I, seed=2).sign() * 6
    amaxes = torch.full((E,), 6.0)
    tokens = triton_nvfp4_experts.cast_tokens(x, amaxes, offs=OFFS)
    matrices = triton_nvfp4_experts.cast_matrices(weight, amaxes)
    out = triton_nvfp4_experts.grouped_mm(
        tokens, matrices, offs=OFFS, sums=False, dtype=torch.bfloat16
    )
    for expert, rows in enumerate(EXPERTS):
        a = nvfp4.cast_rows(x[rows], amaxes[expert], block=ROWS)
        b = nvfp4.cast_rows(weight[expert], amaxes[expert], block=TILES)
        assert torch.equal(out[rows], nvfp4_mm(a, b, dtype=torch.bfloat16))
