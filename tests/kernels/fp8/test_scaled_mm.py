"""The emulated product equals torch's kernel where that runs on a CPU, and its layouts are those
that torch checks.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nanotrain.attention.backends import installed_torch
from nanotrain.kernels.fp8.quantize import Quantized, block_amax, inverse_scales, quantize
from nanotrain.kernels.fp8.scaled_mm import (
    emulate,
    grouped_by_torch,
    multiply_by_kernel,
    scaled_mm,
    swizzle_32_4_4,
)
from nanotrain.precision.fp8 import Block

# A newer one checks them on GPUs only (2.15): on the meta device it takes any.
CHECKS_LAYOUTS = pytest.mark.skipif(
    installed_torch() > (2, 13), reason="torch checks layouts on GPUs"
)
RUNS_ON_CPUS = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def draw(rows: int, columns: int, *, block: Block, dtype: torch.dtype = E4M3) -> Quantized:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    return quantize(
        x,
        inverse_scales(block_amax(x, block), dtype, power_of_two=block != (None, None)),
        block=block,
        dtype=dtype,
    )


@pytest.mark.skipif(not RUNS_ON_CPUS, reason="torch 2.10 and 2.11 have the kernel on GPUs only")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format_a", [E4M3, E5M2])
@pytest.mark.parametrize(("rows", "columns"), [(48, 64), (41, 72)])
@pytest.mark.parametrize("block", [(None, None), (1, None)])
def test_the_kernel_and_the_emulation_agree(
    block: Block, rows: int, columns: int, format_a: torch.dtype, dtype: torch.dtype
) -> None:
    a, b = draw(rows, columns, block=block, dtype=format_a), draw(32, columns, block=block)
    actual, expected = multiply_by_kernel(a, b, dtype=dtype), emulate(a, b, dtype=dtype)
    assert actual.dtype is dtype
    # fp32 sums in another order may round to the next bf16; kernels with scales per row return bf16
    rtol = 1e-5 if dtype is torch.float32 and block == (None, None) else 2.0**-7  # one rounding
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-4)


@pytest.mark.parametrize(
    "blocks", [((1, None), (1, None)), ((1, 128), (128, 128)), ((1, 128), (1, 128))]
)
def test_the_emulation_is_the_product_of_the_dequantized_matrices(
    blocks: tuple[Block, Block],
) -> None:
    a, b = draw(48, 200, block=blocks[0]), draw(144, 200, block=blocks[1])
    expected = a.dequantize().double() @ b.dequantize().double().t()
    torch.testing.assert_close(
        scaled_mm(a, b, dtype=torch.float32).double(), expected, rtol=1e-5, atol=1e-4
    )


class FastProducts(TorchDispatchMode):
    """Whether each product of torch's kernel accumulates fast."""

    def __init__(self) -> None:
        super().__init__()
        self.are_fast: list[bool] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = kwargs or {}
        if func.overloadpacket is torch.ops.aten._scaled_mm_v2:
            self.are_fast.append(given.get("use_fast_accum", len(args) > 11 and args[11]))
        return func(*args, **given)


@CHECKS_LAYOUTS
@pytest.mark.parametrize("block", [(None, None), (1, None), (1, 128), (1, 32)])
def test_products_of_the_forward_accumulate_fast_where_a_kernel_can(block: Block) -> None:
    """cuBLAS has the choice for scales per tensor and row: TransformerEngine makes the same one."""
    matrix = draw(48, 256, block=block)
    on_meta = Quantized(matrix.values.to("meta"), matrix.inverse_scales.to("meta"), block)
    with FastProducts() as products:
        for is_fast in (True, False):
            multiply_by_kernel(on_meta, on_meta, dtype=torch.bfloat16, is_fast=is_fast)
    assert products.are_fast == [block[1] is None, False]


@CHECKS_LAYOUTS
@pytest.mark.parametrize(
    "blocks", [((1, 128), (128, 128)), ((1, 128), (1, 128)), ((1, 32), (1, 32))]
)
@pytest.mark.parametrize(("rows", "columns"), [(48, 256), (41, 144), (48, 640)])
def test_torch_accepts_the_layout_of_the_scales(
    blocks: tuple[Block, Block], rows: int, columns: int
) -> None:
    """torch checks shapes and strides of scales on the meta device, for the kernels that only GPUs
    have.
    """
    a, b = (
        Quantized(each.values.to("meta"), each.inverse_scales.to("meta"), each.block)
        for each in (draw(rows, columns, block=blocks[0]), draw(256, columns, block=blocks[1]))
    )
    assert multiply_by_kernel(a, b, dtype=torch.float32).shape == (rows, 256)


@CHECKS_LAYOUTS
def test_torch_refuses_another_layout() -> None:
    a, b = (
        torch.empty(48, 256, dtype=E4M3, device="meta"),
        torch.empty(128, 256, dtype=E4M3, device="meta"),
    )
    scales, types = (
        (torch.empty(48, 2, device="meta"), torch.empty(1, 2, device="meta")),
        F.ScalingType,
    )
    with pytest.raises((RuntimeError, ValueError)):
        F.scaled_mm(a, b.t(), scales[0], types.BlockWise1x128, scales[1], types.BlockWise128x128)


def test_the_swizzle_is_that_of_the_cublas_documentation() -> None:
    """The scale of row r and block c is at offset (r % 32) * 16 + (r // 32) * 4 + c of a tile of
    128 x 4.
    """
    scales = torch.arange(200 * 5, dtype=torch.float32).view(200, 5) + 1
    actual = swizzle_32_4_4(scales)
    assert actual.numel() == 256 * 8
    for row, column in ((0, 0), (1, 0), (33, 2), (127, 3), (128, 0), (199, 4)):
        tile = (row // 128) * 2 + column // 4
        inner = row % 128
        offset = tile * 512 + (inner % 32) * 16 + (inner // 32) * 4 + column % 4
        assert actual[offset] == scales[row, column]
    assert actual.sum() == scales.sum()


# experts of 3, 0 and 17 tokens; 2 of 22 are dropped
OFFS = torch.tensor([3, 3, 20], dtype=torch.int32)


@pytest.mark.parametrize("block", [(None, None), (1, None)])
def test_torch_gets_rows_columns_and_a_scale_of_each(
    block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def record(a, b, scale_a, _, scale_b, *_given, offs, **how):
        output_dtype = how.pop("output_dtype")
        assert how == {"use_fast_accum": False}, "gradients are added in fp32"
        calls.append((a, b, scale_a, scale_b, offs.tolist()))
        return a.new_zeros(1, dtype=output_dtype)

    monkeypatch.setattr(F, "scaled_grouped_mm", record)
    is_row = block == (1, None)

    def matrix(rows: int, columns: int, num_scales: int) -> Quantized:
        scales = torch.arange(float(num_scales if is_row else 3))[:, None]
        return Quantized(torch.ones(rows, columns).to(E4M3), scales, block)

    tokens, matrices = matrix(22, 32, 22), matrix(3 * 48, 32, 3 * 48)
    grouped_by_torch(tokens, matrices, offs=OFFS, sums=False)
    a, b, scale_a, scale_b, ends = calls[-1]
    assert a.shape == (22, 32) and b.shape == (3, 32, 48) and b.stride(1) == 1, (
        "K is contiguous in both"
    )
    assert scale_b.shape == (3, 48) and ends == [3, 3, 20]
    assert scale_a.tolist() == (list(range(22)) if is_row else [0.0] * 3 + [2.0] * 19), (
        "of its expert"
    )

    grouped_by_torch(matrix(32, 64, 96), matrix(48, 64, 144), offs=OFFS, sums=True)
    a, b, scale_a, scale_b, ends = calls[-1]
    assert a.shape == (32, 64) and a.is_contiguous() and b.shape == (64, 48) and b.stride(0) == 1
    assert ends == [16, 16, 48], "multiples of 16"
    assert scale_a.shape == (96,) and scale_b.shape == (144,)
    assert scale_a.tolist() == (list(range(96)) if is_row else [0.0] * 32 + [1.0] * 32 + [2.0] * 32)
