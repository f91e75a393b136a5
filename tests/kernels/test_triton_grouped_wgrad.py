"""The Triton kernel of experts' weight gradients against fp64, in Triton's interpreter."""

import os

import pytest
import torch

from nanotrain.kernels import grouped
from nanotrain.kernels.grouped import GroupedMM
from tests.kernels.test_grouped import COUNTS, FilledView

triton = pytest.importorskip("triton")
from nanotrain.kernels import triton_grouped_wgrad  # noqa: E402

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
OUTPUTS, INPUTS = 24, 40


def by_expert(grad, x, counts):
    """[E, O, I] in fp64."""
    products = []
    start = 0
    for count in counts:
        tokens = slice(start, start + count)
        products.append(grad[tokens].double().t() @ x[tokens].double())
        start += count
    return torch.stack(products)


@pytest.mark.skipif(not IS_INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("has_grads", [False, True])
@pytest.mark.parametrize("counts", [COUNTS[1], [70, 0, 33, 64]])
def test_gradients_are_added_in_fp32_to_those_of_earlier_microbatches(
    counts, has_grads, monkeypatch
):
    # Tiles that do not divide the sizes, in several bands. In fp16: the interpreter multiplies the
    # bits of bf16 as integers.
    for name, size in {"TILE_ROWS": 16, "TILE_COLUMNS": 32, "TILE_TOKENS": 32, "BAND": 1}.items():
        monkeypatch.setattr(triton_grouped_wgrad, name, size)
    generator = torch.Generator().manual_seed(len(counts))
    rows = sum(counts) + 3  # tokens of no expert at the end
    grad = torch.randn(rows, OUTPUTS, generator=generator).half()
    x = torch.randn(rows, INPUTS, generator=generator).half()
    grad[sum(counts) :] = torch.nan
    offs = torch.tensor(counts).cumsum(0).int()
    before = torch.randn(len(counts), OUTPUTS, INPUTS, generator=generator)
    view = FilledView(before.clone() if has_grads else before * torch.nan, has_grads)
    monkeypatch.setattr(grouped, "has_wgrad_kernel", lambda _: True)
    assert GroupedMM().accumulate_wgrad(grad, x, offs=offs, view=view)
    expected = by_expert(grad, x, counts)
    if has_grads:
        expected += before.double()
    # products of fp16 are exact in fp32, so only the sums round
    torch.testing.assert_close(view.buffer.double(), expected, rtol=1e-6, atol=1e-5)


def test_only_16_bit_tokens_have_the_kernel():
    for dtype, expected in [(torch.bfloat16, True), (torch.float16, True), (torch.float32, False)]:
        assert grouped.has_wgrad_kernel(torch.empty(1, device="meta", dtype=dtype)) == expected
    assert not grouped.has_wgrad_kernel(torch.empty(1, dtype=torch.bfloat16)), "CPUs loop"
