"""The packed operands of torch's NVFP4 product, bit by bit, and the product itself."""

import torch

from nanotrain.kernels.fp8.nvfp4 import Nvfp4, matrix_amax, quantize_nvfp4
from nanotrain.kernels.fp8.nvfp4_mm import multiply_packed, nvfp4_mm, pack, pack_matrix
from tests.kernels.fp8.test_nvfp4 import NUMBERS, ROWS, TILES, draw
from tests.kernels.fp8.test_scaled_mm import CHECKS_LAYOUTS


def test_two_numbers_are_a_byte_the_first_in_the_low_bits() -> None:
    """Code 2 e + m of 2^(e - 1) (1 + m / 2), or m / 2 for e = 0; 8 is the sign."""
    numbers = torch.tensor([NUMBERS, [-number for number in NUMBERS]])
    packed = pack(numbers.to(torch.float8_e4m3fn))
    assert packed.dtype is torch.float4_e2m1fn_x2 and packed.shape == (2, 4)
    assert packed.view(torch.uint8).tolist() == [
        [0x10, 0x32, 0x54, 0x76],
        [0x98, 0xBA, 0xDC, 0xFE],
    ]


def test_the_product_is_that_of_the_dequantized_matrices() -> None:
    x, weight = draw(41, 80), draw(48, 80, seed=1)
    a = quantize_nvfp4(x, matrix_amax(x), block=ROWS)
    b = quantize_nvfp4(weight, matrix_amax(weight), block=TILES)
    expected = a.dequantize().double() @ b.dequantize().double().t()
    actual = nvfp4_mm(a, b, dtype=torch.float32)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-4)
    empty = quantize_nvfp4(x[:0], matrix_amax(x[:0]), block=ROWS)
    assert nvfp4_mm(empty, b, dtype=torch.bfloat16).shape == (0, 48)


@CHECKS_LAYOUTS
def test_torch_accepts_the_layout() -> None:
    """torch checks dtypes, sizes and swizzles of NVFP4 on the meta device."""
    for rows, columns in ((41, 80), (128, 256), (300, 16)):
        a, b = (
            Nvfp4(
                torch.empty(size, columns, dtype=torch.float8_e4m3fn, device="meta"),
                torch.empty(size, -(-columns // 16), dtype=torch.float8_e4m3fn, device="meta"),
                torch.empty((), device="meta"),
            )
            for size in (rows, 48)
        )
        product = multiply_packed(pack_matrix(a), pack_matrix(b))
        assert product.shape == (rows, 48) and product.dtype is torch.bfloat16


def test_the_kernel_gets_the_matrix(monkeypatch) -> None:
    """What torch gets, read back byte by byte as cuBLAS does, is the dequantized matrix."""
    calls = []

    def record(a, b, scale_a, _, scale_b, *given, output_dtype):
        calls.append((a, b.t(), scale_a, scale_b))
        return torch.zeros(len(a), b.shape[1], dtype=output_dtype)

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", record)
    x, weight = draw(37, 80), draw(32, 80, seed=1)
    a = quantize_nvfp4(x, matrix_amax(x), block=ROWS)
    b = quantize_nvfp4(weight, matrix_amax(weight), block=TILES)
    assert multiply_packed(pack_matrix(a), pack_matrix(b)).shape == (37, 32)
    packed_a, packed_b, scales_a, scales_b = calls[0]
    for matrix, packed, (blocks, tensor) in ((a, packed_a, scales_a), (b, packed_b, scales_b)):
        assert packed.shape[1] * 2 == 96 and len(packed) % 16 == 0
        row, column = torch.arange(len(matrix.values))[:, None], torch.arange(80)
        bytes_ = packed.view(torch.uint8).long()[row, column // 2]
        code = (bytes_ >> 4 * (column % 2)) & 15
        value = torch.tensor(NUMBERS)[code & 7] * (1 - 2 * (code >> 3))
        # cuBLAS, "1D block scaling factors layout": tiles of 128 rows and 4 blocks, 2 per row here
        block = column // 16
        offset = 512 * (row // 128 * 2 + block // 4) + row % 32 * 16 + row % 128 // 32 * 4
        scale = blocks.float()[offset + block % 4]
        assert torch.equal(value * scale * tensor, matrix.dequantize())
