"""The products of fp8 matrices.

    scaled_mm          a [M, K], b [N, K]   -> a b^T [M, N]
    grouped_by_torch   the products of all experts

On CUDA they are torch's products, which take a block size and a layout of the scales per operand.
Other devices emulate them: fp8 values are multiplied exactly and summed in fp32.

    block of a, b       kernel
    (None, None)        TensorWise
    (1, None)           RowWise, also for torch's grouped product
    (1, 128)            BlockWise1x128
    (128, 128)          BlockWise128x128
    (1, 32)             BlockWise1x32, scales in e8m0

Tensor cores of Ada and Hopper add fp8 products in 14 bits. Products of the forward take these sums
as they are (`is_fast`: torch's `use_fast_accum`), which is 10 to 15 % faster by NVIDIA's numbers;
those of gradients are added in fp32 every 128 values. Scales per block have one form only.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.kernels.fp8.quantize import Quantized
from nanotrain.kernels.linear import add_cast
from nanotrain.precision.fp8 import (
    BLOCK_1X32,
    BLOCK_1X128,
    BLOCK_128X128,
    PER_ROW,
    PER_TENSOR,
    Block,
)

# Sizes of torch's kernels are multiples of this; M and K are padded, K also to whole blocks.
ALIGNMENT = 16


def scaled_mm(a: Quantized, b: Quantized, *, dtype: torch.dtype, is_fast: bool = False) -> Tensor:
    """[M, K], [N, K] -> [M, N] in `dtype`; empty or zero for an expert without tokens."""
    if a.values.numel() == 0:
        return torch.zeros(len(a.values), len(b.values), dtype=dtype, device=a.values.device)
    if a.values.device.type == "cpu":
        return emulate(a, b, dtype=dtype)
    operands, blocks = pack_operands(a, b)
    return fp8_mm(operands, blocks=blocks, dtype=dtype, is_fast=is_fast)


@torch.library.custom_op("nanotrain::fp8_mm", mutates_args=())
def fp8_mm(
    operands: Sequence[Tensor],
    *,
    blocks: Sequence[int],
    dtype: torch.dtype,
    is_fast: bool = False,
) -> Tensor:
    """`multiply_by_kernel` as a node of graphs: torch's compiler cannot trace most blocks."""
    a, b = unpack_operands(operands, blocks)
    return multiply_by_kernel(a, b, dtype=dtype, is_fast=is_fast)


def pack_operands(a: Quantized, b: Quantized) -> tuple[list[Tensor], list[int]]:
    """Two matrices as arguments of operators: tensors, and block sizes with 0 for None."""
    tensors = [a.values, a.inverse_scales, b.values, b.inverse_scales]
    blocks = [size or 0 for size in (*a.block, *b.block)]
    return tensors, blocks


def unpack_operands(
    operands: Sequence[Tensor], blocks: Sequence[int]
) -> tuple[Quantized, Quantized]:
    """The inverse of `pack_operands`."""
    a, scales_a, b, scales_b = operands
    rows_a, columns_a, rows_b, columns_b = (size or None for size in blocks)
    first = Quantized(a, scales_a, (rows_a, columns_a))
    second = Quantized(b, scales_b, (rows_b, columns_b))
    return first, second


@fp8_mm.register_fake
def _(
    operands: Sequence[Tensor],
    *,
    blocks: Sequence[int],
    dtype: torch.dtype,
    is_fast: bool = False,
) -> Tensor:
    a, _, b, _ = operands
    return a.new_empty((len(a), len(b)), dtype=dtype)


def write_scaled_mm(a: Quantized, b: Quantized, *, out: Tensor, adds: bool) -> None:
    """[M, K], [N, K] -> `out` [M, N], written, or added to its values."""
    # kernels of other blocks return bf16
    is_wide = a.values.device.type == "cpu" or a.block == PER_TENSOR
    if adds:
        dtype = torch.bfloat16 if out.is_cuda else out.dtype
        add_cast(out, scaled_mm(a, b, dtype=dtype))
    elif is_wide and out.is_cuda and len(a.values) % ALIGNMENT == 0:
        multiply_by_kernel(a, b, dtype=out.dtype, out=out)
    else:
        dtype = out.dtype if is_wide else torch.bfloat16
        out.copy_(scaled_mm(a, b, dtype=dtype))


def emulate(a: Quantized, b: Quantized, *, dtype: torch.dtype) -> Tensor:
    """The product in fp32, rounded to `dtype` once."""
    if a.block[1] is None and b.block[1] is None:  # as the kernels: scales are applied to the sums
        out = a.values.float() @ b.values.float().t()
        out.mul_(a.inverse_scales).mul_(b.inverse_scales.t())
    else:
        out = a.dequantize() @ b.dequantize().t()
    return out.to(dtype)


def multiply_by_kernel(
    a: Quantized,
    b: Quantized,
    *,
    dtype: torch.dtype,
    out: Tensor | None = None,
    is_fast: bool = False,
) -> Tensor:
    """The product by torch's kernel, written to `out` if given.

    precision/fp8.py has the devices of each recipe.
    """
    num_rows = len(a.values)
    a = _pad_rows(a)
    # Only the kernels with one scale per tensor have fp32 results on all devices.
    kernel_dtype = dtype if a.block == PER_TENSOR else torch.bfloat16
    functional: Any = F
    swizzle = functional.SwizzleType.NO_SWIZZLE
    if a.block == BLOCK_1X32:
        swizzle = functional.SwizzleType.SWIZZLE_32_4_4
    layout_a = _LAYOUTS[a.block]
    layout_b = _LAYOUTS[b.block]
    scaling_a = getattr(functional.ScalingType, layout_a.scaling_type)
    scaling_b = getattr(functional.ScalingType, layout_b.scaling_type)
    scales_a = layout_a.arrange(a.inverse_scales)
    scales_b = layout_b.arrange(b.inverse_scales)
    if b.block == PER_ROW:
        scales_b = scales_b.t()
    arguments = (
        _pad_k(a),
        _pad_k(b).t(),
        [scales_a],
        [scaling_a.value],
        [swizzle.value],
        [scales_b],
        [scaling_b.value],
        [swizzle.value],
        None,  # no bias
        kernel_dtype,
    )
    multiply: Any = torch.ops.aten._scaled_mm_v2
    accumulation = {"use_fast_accum": is_fast and a.block[1] is None}
    product: Tensor
    if out is None:
        product = multiply(*arguments, **accumulation)
    else:
        product = multiply.out(*arguments, **accumulation, out=out)
    return product[:num_rows].to(dtype)


def swizzle_32_4_4(scales: Tensor) -> Tensor:
    """Scales [R, C] in the order of cuBLAS for MX formats, padded with 0.

    Tiles of 128 x 4 are stored as 32 x 4 x 4.

    Source: cuBLAS documentation, "1D block scaling factors layout".
    """
    rows, columns = scales.shape
    padded = F.pad(scales, (0, -columns % 4, 0, -rows % 128))
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).flatten()


def _column_major(scales: Tensor) -> Tensor:
    return scales.t().contiguous().t()


def _transposed_tiles(scales: Tensor) -> Tensor:
    """[N / 128, K / 128] -> [K / 128 rounded up to a multiple of 4, N / 128], column-major."""
    return F.pad(scales, (0, -scales.shape[1] % 4)).contiguous().t()


def is_swizzled(scales: Tensor) -> bool:
    """Whether a kernel has cast the operand, and written its scales in the order of cuBLAS."""
    return scales.dtype is torch.float8_e8m0fnu


def _swizzle(scales: Tensor) -> Tensor:
    if is_swizzled(scales):
        return scales
    return swizzle_32_4_4(scales).to(torch.float8_e8m0fnu)


class ScaleLayout(NamedTuple):
    """Format of an operand's scales in torch's kernel."""

    scaling_type: str  # name of torch's `ScalingType`
    arrange: Callable[[Tensor], Tensor]  # scales in the layout of the kernel


_LAYOUTS: dict[Block, ScaleLayout] = {
    PER_TENSOR: ScaleLayout("TensorWise", lambda scales: scales.reshape(())),
    PER_ROW: ScaleLayout("RowWise", torch.Tensor.contiguous),
    BLOCK_1X128: ScaleLayout("BlockWise1x128", _column_major),
    BLOCK_128X128: ScaleLayout("BlockWise128x128", _transposed_tiles),
    BLOCK_1X32: ScaleLayout("BlockWise1x32", _swizzle),
}


def _pad_rows(quantized: Quantized) -> Quantized:
    """Rows of zeros at the end: an expert has any number of tokens."""
    padding = (0, 0, 0, -len(quantized.values) % ALIGNMENT)
    scales = quantized.inverse_scales
    if quantized.block[0] == 1 and not is_swizzled(scales):
        scales = F.pad(scales, padding)
    return Quantized(_pad(quantized.values, padding), scales, quantized.block)


def _pad_k(quantized: Quantized) -> Tensor:
    """The values, with zeros along K."""
    values = quantized.values
    unit = max(ALIGNMENT, quantized.block[1] or 1)
    return _pad(values, (0, -values.shape[1] % unit))


def _pad(values: Tensor, padding: tuple[int, ...]) -> Tensor:
    """fp8 values with zeros at the ends; the byte 0 is 0.0."""
    if not any(padding):
        return values
    return F.pad(values.view(torch.uint8), padding).view(values.dtype)


def grouped_by_torch(
    a: Quantized, b: Quantized, *, offs: Tensor, sums: bool, is_fast: bool = False
) -> Tensor:
    """The products of all experts, in bf16.

    [T, K], [E * N, K] -> [T, N], or [M, T], [N, T] -> [E, M, N].

    Args:
        a: matrix with a scale per expert or per row.
        b: matrix with the same blocks.
        offs: [E] int32, the end of each expert's tokens.
        sums: whether products sum over tokens; each expert's tokens begin at a multiple of 16.
        is_fast: whether sums stay in the tensor cores, for products of the forward.
    """
    if sums:
        return _sum_over_tokens(a, b, offs=offs)
    return _multiply_tokens(a, b, offs=offs, is_fast=is_fast)


def _multiply_tokens(a: Quantized, b: Quantized, *, offs: Tensor, is_fast: bool) -> Tensor:
    """[T, K], [E * N, K] -> [T, N]."""
    num_tokens = len(a.values)
    experts = len(offs)
    width = len(b.values) // experts
    if a.values.numel() == 0:  # torch refuses most strides of an empty matrix
        return a.values.new_zeros((0, width), dtype=torch.bfloat16)
    scales_a = a.inverse_scales
    if a.block == PER_TENSOR:  # from one per expert to one per token
        positions = torch.arange(num_tokens, device=offs.device, dtype=offs.dtype)
        expert_of_token = torch.searchsorted(offs, positions, right=True).clamp(max=experts - 1)
        scales_a = scales_a[expert_of_token]
    matrices = b.values.unflatten(0, (experts, -1))
    return _grouped_mm(
        a.values,
        matrices.mT,
        scales_a=scales_a.flatten().contiguous(),
        scales_b=_expert_scales(b, experts=experts, width=width),
        offs=offs,
        is_fast=is_fast,
    )


def _sum_over_tokens(a: Quantized, b: Quantized, *, offs: Tensor) -> Tensor:
    """[M, T], [N, T] -> [E, M, N]."""
    rows = len(a.values)
    columns = len(b.values)
    experts = len(offs)
    if a.values.numel() == 0:  # torch refuses most strides of an empty matrix
        return a.values.new_zeros((experts, rows, columns), dtype=torch.bfloat16)
    counts = offs.diff(prepend=offs.new_zeros(1))
    padded_counts = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    padded_offs = padded_counts.cumsum(0).int()
    scales_a = _expert_scales(a, experts=experts, width=rows)
    scales_b = _expert_scales(b, experts=experts, width=columns)
    return _grouped_mm(
        a.values,
        b.values.t(),
        scales_a=scales_a.flatten(),
        scales_b=scales_b.flatten(),
        offs=padded_offs,
    )


def _expert_scales(matrix: Quantized, *, experts: int, width: int) -> Tensor:
    """[E, width] scales, from one per expert or one per row of each expert."""
    scales = matrix.inverse_scales.view(experts, -1)
    return scales.expand(experts, width).contiguous()


def _grouped_mm(
    a: Tensor,
    b: Tensor,
    *,
    scales_a: Tensor,
    scales_b: Tensor,
    offs: Tensor,
    is_fast: bool = False,
) -> Tensor:
    """torch's grouped product with scales per row."""
    functional: Any = F
    row_wise = functional.ScalingType.RowWise
    not_swizzled = functional.SwizzleType.NO_SWIZZLE
    out: Tensor = functional.scaled_grouped_mm(
        a,
        b,
        scales_a,
        row_wise,
        scales_b,
        row_wise,
        not_swizzled,
        not_swizzled,
        offs=offs,
        output_dtype=torch.bfloat16,
        use_fast_accum=is_fast,
    )
    return out
