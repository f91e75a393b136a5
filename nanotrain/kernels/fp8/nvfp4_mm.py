"""The product of two matrices in NVFP4, and the layout of torch's kernel.

    nvfp4_mm   a [M, K], b [N, K]   -> a b^T [M, N]
    pack       e2m1 numbers -> two per byte

On compute capability 10.x it is torch's kernel with scales on two levels: 1 x 16 in e4m3, in the
order of cuBLAS, and one per tensor in fp32. Other devices emulate it: values times block scales are
exact in fp32, products of them are summed in fp32, and both tensor scales multiply the sum.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.kernels.fp8.nvfp4 import Nvfp4, PackedNvfp4
from nanotrain.kernels.fp8.scaled_mm import ALIGNMENT, swizzle_32_4_4

# torch checks the bytes of a packed row, and 16 of them are 32 elements
K_UNIT = 2 * ALIGNMENT


def nvfp4_mm(a: Nvfp4 | PackedNvfp4, b: Nvfp4 | PackedNvfp4, *, dtype: torch.dtype) -> Tensor:
    """[M, K], [N, K] -> [M, N] in `dtype`; empty or zero for an expert without tokens."""
    if a.values.numel() == 0:
        return torch.zeros(a.num_rows, b.num_rows, dtype=dtype, device=a.values.device)
    if isinstance(a, Nvfp4) and isinstance(b, Nvfp4):
        if a.values.device.type == "cpu":
            return emulate(a, b, dtype=dtype)
        a, b = pack_matrix(a), pack_matrix(b)
    assert isinstance(a, PackedNvfp4), "both operands are packed, or none"
    assert isinstance(b, PackedNvfp4), "both operands are packed, or none"
    return multiply_packed(a, b).to(dtype)


def emulate(a: Nvfp4, b: Nvfp4, *, dtype: torch.dtype) -> Tensor:
    """The product in fp32, rounded to `dtype` once."""
    sums = a.scaled_values() @ b.scaled_values().t()
    factor = a.tensor_scale * b.tensor_scale
    return (sums * factor).to(dtype)


def multiply_packed(a: PackedNvfp4, b: PackedNvfp4) -> Tensor:
    """[M, K], [N, K] -> [M, N] in bf16 by torch's kernel."""
    functional: Any = F
    scaling = functional.ScalingType
    swizzle = functional.SwizzleType
    recipe = [scaling.BlockWise1x16, scaling.TensorWise]
    order = [swizzle.SWIZZLE_32_4_4, swizzle.NO_SWIZZLE]
    product: Tensor = functional.scaled_mm(
        a.values,
        b.values.t(),
        [a.block_scales, a.tensor_scale],
        recipe,
        [b.block_scales, b.tensor_scale],
        recipe,
        order,
        order,
        output_dtype=torch.bfloat16,
    )
    return product[: a.num_rows, : b.num_rows]


def pack_matrix(matrix: Nvfp4) -> PackedNvfp4:
    """A matrix with two values per byte, padded, and its scales in the order of cuBLAS."""
    values = pack(_padded(matrix.values))
    scales = matrix.block_scales.view(torch.uint8)
    missing_columns = -(-matrix.values.shape[1] // K_UNIT) * 2 - scales.shape[1]
    padded = F.pad(scales, (0, missing_columns, 0, -len(scales) % ALIGNMENT))
    swizzled = swizzle_32_4_4(padded).view(torch.float8_e4m3fn)
    return PackedNvfp4(values, swizzled, matrix.tensor_scale, matrix.num_rows)


def pack(values: Tensor) -> Tensor:
    """[R, K] e4m3, numbers of e2m1 -> [R, K / 2] float4_e2m1fn_x2, the first in the low bits."""
    codes = e2m1_codes(values)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return packed.view(torch.float4_e2m1fn_x2)


def e2m1_codes(values: Tensor) -> Tensor:
    """uint8 codes of e2m1 numbers that are stored in e4m3: sign, 2 bits exponent, 1 bit mantissa.

    From 1 on the exponents of both formats differ by 6; 0.5 is subnormal in e2m1 only.

    >>> numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -6]).to(torch.float8_e4m3fn)
    >>> e2m1_codes(numbers).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 15]
    """
    bits = values.view(torch.uint8)
    magnitude = (bits & 0x7F).to(torch.int16)
    codes = (magnitude >> 2) - 12
    codes = codes.clamp(min=0)
    codes += magnitude == 0x30
    sign = (bits & 0x80) >> 4
    return codes.to(torch.uint8) | sign


def _padded(values: Tensor) -> Tensor:
    """The values with zeros up to multiples of 16 rows and of 32 elements per row."""
    padding = (0, -values.shape[1] % K_UNIT, 0, -len(values) % ALIGNMENT)
    if not any(padding):
        return values
    return F.pad(values.view(torch.uint8), padding).view(values.dtype)
