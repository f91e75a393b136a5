"""The product of two fp8 matrices, a [M, K] and b [N, K]: `scaled_mm` -> a b^T [M, N].

On CUDA by torch's scaled product, which takes a block size of each operand and the scales in a layout of its own. Other
devices emulate it: fp8 values are multiplied exactly and summed in fp32.

    block of a, b       kernel
    (None, None)        TensorWise
    (1, None)           RowWise
    (1, 128)            BlockWise1x128
    (128, 128)          BlockWise128x128
    (1, 32)             BlockWise1x32, scales in e8m0
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.kernels.fp8.quantize import Quantized
from nanotrain.precision.fp8 import Block

ALIGNMENT = 16  # torch's kernels take sizes that are multiples of this; M and K are padded here, K also to whole blocks


def scaled_mm(a: Quantized, b: Quantized, *, dtype: torch.dtype) -> Tensor:
    """[M, K], [N, K] -> [M, N] in `dtype`; without tokens (an expert that no token chose) empty or zero."""
    if a.values.numel() == 0:
        return torch.zeros(len(a.values), len(b.values), dtype=dtype, device=a.values.device)
    return multiply_by_kernel(a, b, dtype=dtype) if a.values.is_cuda else emulate(a, b, dtype=dtype)


def emulate(a: Quantized, b: Quantized, *, dtype: torch.dtype) -> Tensor:
    """The product in fp32, rounded to `dtype` once."""
    if a.block[1] is None and b.block[1] is None:  # as the kernels: scales are applied to the sums
        out = a.values.float() @ b.values.float().t()
        return out.mul_(a.inverse_scales).mul_(b.inverse_scales.t()).to(dtype)
    return (a.dequantize() @ b.dequantize().t()).to(dtype)


def multiply_by_kernel(a: Quantized, b: Quantized, *, dtype: torch.dtype) -> Tensor:
    """The product by torch's kernel; the devices of each recipe are in precision/fp8.py."""
    num_rows, a = len(a.values), _pad_rows(a)
    # Only the kernels with one scale per tensor have fp32 results on all devices.
    kernel_dtype = dtype if a.block == (None, None) else torch.bfloat16
    functional: Any = F
    scaling, swizzle = functional.ScalingType, functional.SwizzleType
    (name_a, layout_a), (name_b, layout_b) = _LAYOUTS[a.block], _LAYOUTS[b.block]
    swizzles = swizzle.SWIZZLE_32_4_4 if a.block == (1, 32) else swizzle.NO_SWIZZLE
    scales_b = layout_b(b.inverse_scales)
    out: Tensor = functional.scaled_mm(
        _pad_k(a),
        _pad_k(b).t(),
        layout_a(a.inverse_scales),
        getattr(scaling, name_a),
        scales_b.t() if b.block == (1, None) else scales_b,
        getattr(scaling, name_b),
        swizzles,
        swizzles,
        output_dtype=kernel_dtype,
    )
    return out[:num_rows].to(dtype)


def swizzle_32_4_4(scales: Tensor) -> Tensor:
    """Scales [R, C] in the order of cuBLAS for MX formats: tiles of 128 x 4, each stored as 32 x 4 x 4; padded with 0.

    Source: cuBLAS documentation, "1D block scaling factors layout".
    """
    padded = F.pad(scales, (0, -scales.shape[1] % 4, 0, -scales.shape[0] % 128))
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).flatten()


def _column_major(scales: Tensor) -> Tensor:
    return scales.t().contiguous().t()


def _transposed_tiles(scales: Tensor) -> Tensor:
    """[N / 128, K / 128] -> [K / 128 rounded up to a multiple of 4, N / 128], column-major."""
    return F.pad(scales, (0, -scales.shape[1] % 4)).contiguous().t()


# block -> the name of torch's scaling type, and the layout of its scales
_LAYOUTS: dict[Block, tuple[str, Callable[[Tensor], Tensor]]] = {
    (None, None): ("TensorWise", lambda scales: scales.reshape(())),
    (1, None): ("RowWise", torch.Tensor.contiguous),
    (1, 128): ("BlockWise1x128", _column_major),
    (128, 128): ("BlockWise128x128", _transposed_tiles),
    (1, 32): ("BlockWise1x32", lambda scales: swizzle_32_4_4(scales).to(torch.float8_e8m0fnu)),
}


def _pad_rows(quantized: Quantized) -> Quantized:
    """Rows of zeros at the end: the tokens of an expert are any number."""
    missing = -len(quantized.values) % ALIGNMENT
    if missing == 0:
        return quantized
    values, scales = quantized.values, quantized.inverse_scales
    padded = F.pad(values.view(torch.uint8), (0, 0, 0, missing)).view(values.dtype)  # the byte 0 is 0.0
    return Quantized(padded, F.pad(scales, (0, 0, 0, missing)) if quantized.block[0] == 1 else scales, quantized.block)


def _pad_k(quantized: Quantized) -> Tensor:
    """The values, with zeros along K."""
    values, unit = quantized.values, max(ALIGNMENT, quantized.block[1] or 1)
    missing = -values.shape[1] % unit
    if missing == 0:
        return values
    return F.pad(values.view(torch.uint8), (0, missing)).view(values.dtype)  # the byte 0 is 0.0
