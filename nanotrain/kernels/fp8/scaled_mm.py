"""The products of fp8 matrices.

    scaled_mm          a [M, K], b [N, K]   -> a b^T [M, N]
    grouped_by_torch   of all experts

On CUDA they are torch's, which takes a block size of each operand and the scales in a layout of its
own. Other devices emulate them: fp8 values are multiplied exactly and summed in fp32.

    block of a, b       kernel
    (None, None)        TensorWise
    (1, None)           RowWise, also of torch's grouped product: fp8 rows [M, K] and columns [K, N] of each expert
    (1, 128)            BlockWise1x128
    (128, 128)          BlockWise128x128
    (1, 32)             BlockWise1x32, scales in e8m0
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.kernels.fp8.quantize import Quantized
from nanotrain.kernels.linear import add_cast
from nanotrain.precision.fp8 import Block

# torch's kernels take sizes that are multiples of this; M and K are padded here, K also to whole
# blocks
ALIGNMENT = 16


def scaled_mm(a: Quantized, b: Quantized, *, dtype: torch.dtype) -> Tensor:
    """[M, K], [N, K] -> [M, N] in `dtype`; without tokens (an expert that no token chose) empty or
    zero.
    """
    if a.values.numel() == 0:
        return torch.zeros(len(a.values), len(b.values), dtype=dtype, device=a.values.device)
    if a.values.device.type == "cpu":
        return emulate(a, b, dtype=dtype)
    operands, blocks = packed(a, b)
    return fp8_mm(operands, blocks=blocks, dtype=dtype)


@torch.library.custom_op("nanotrain::fp8_mm", mutates_args=())
def fp8_mm(operands: Sequence[Tensor], *, blocks: Sequence[int], dtype: torch.dtype) -> Tensor:
    """`multiply_by_kernel` as a node of graphs: torch's compiler has no form of its own for most
    blocks.
    """
    a, b = unpacked(operands, blocks)
    return multiply_by_kernel(a, b, dtype=dtype)


def packed(a: Quantized, b: Quantized) -> tuple[list[Tensor], list[int]]:
    """Two matrices as operators take them: tensors, and sizes of blocks with 0 for all."""
    return [a.values, a.inverse_scales, b.values, b.inverse_scales], [
        size or 0 for size in (*a.block, *b.block)
    ]


def unpacked(operands: Sequence[Tensor], blocks: Sequence[int]) -> tuple[Quantized, Quantized]:
    """The inverse of `packed`."""
    (a, scales_a, b, scales_b), sizes = operands, [size or None for size in blocks]
    return Quantized(a, scales_a, (sizes[0], sizes[1])), Quantized(
        b, scales_b, (sizes[2], sizes[3])
    )


@fp8_mm.register_fake
def _(operands: Sequence[Tensor], *, blocks: Sequence[int], dtype: torch.dtype) -> Tensor:
    return operands[0].new_empty((len(operands[0]), len(operands[2])), dtype=dtype)


def write_scaled_mm(a: Quantized, b: Quantized, *, out: Tensor, adds: bool) -> None:
    """[M, K], [N, K] -> `out` [M, N]; written, or added to what it holds."""
    # kernels of other blocks return bf16
    is_wide = a.values.device.type == "cpu" or a.block == (None, None)
    if adds:
        add_cast(out, scaled_mm(a, b, dtype=torch.bfloat16 if out.is_cuda else out.dtype))
    elif is_wide and out.is_cuda and len(a.values) % ALIGNMENT == 0:
        multiply_by_kernel(a, b, dtype=out.dtype, out=out)
    else:
        out.copy_(scaled_mm(a, b, dtype=out.dtype if is_wide else torch.bfloat16))


def emulate(a: Quantized, b: Quantized, *, dtype: torch.dtype) -> Tensor:
    """The product in fp32, rounded to `dtype` once."""
    if a.block[1] is None and b.block[1] is None:  # as the kernels: scales are applied to the sums
        out = a.values.float() @ b.values.float().t()
        return out.mul_(a.inverse_scales).mul_(b.inverse_scales.t()).to(dtype)
    return (a.dequantize() @ b.dequantize().t()).to(dtype)


def multiply_by_kernel(
    a: Quantized, b: Quantized, *, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """The product by torch's kernel, in `out` where it is given; precision/fp8.py has the devices
    of each recipe.
    """
    num_rows, a = len(a.values), _pad_rows(a)
    # Only the kernels with one scale per tensor have fp32 results on all devices.
    kernel_dtype = dtype if a.block == (None, None) else torch.bfloat16
    functional: Any = F
    scaling, swizzle = functional.ScalingType, functional.SwizzleType
    (name_a, layout_a), (name_b, layout_b) = _LAYOUTS[a.block], _LAYOUTS[b.block]
    swizzles = [(swizzle.SWIZZLE_32_4_4 if a.block == (1, 32) else swizzle.NO_SWIZZLE).value]
    recipe_a, recipe_b = ([getattr(scaling, name).value] for name in (name_a, name_b))
    scales_a, scales_b = [layout_a(a.inverse_scales)], layout_b(b.inverse_scales)
    scales_b = scales_b.t() if b.block == (1, None) else scales_b
    given = (
        _pad_k(a),
        _pad_k(b).t(),
        scales_a,
        recipe_a,
        swizzles,
        [scales_b],
        recipe_b,
        swizzles,
        None,
        kernel_dtype,
    )
    multiply: Any = torch.ops.aten._scaled_mm_v2
    product: Tensor = multiply(*given) if out is None else multiply.out(*given, out=out)
    return product[:num_rows].to(dtype)


def swizzle_32_4_4(scales: Tensor) -> Tensor:
    """Scales [R, C] in the order of cuBLAS for MX formats: tiles of 128 x 4, each stored as 32 x 4
    x 4; padded with 0.

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
    (1, 32): ("BlockWise1x32", lambda scales: scales if is_swizzled(scales) else _swizzled(scales)),
}


def is_swizzled(scales: Tensor) -> bool:
    """Whether a kernel has cast the operand, and written its scales in the order of cuBLAS."""
    return scales.dtype is torch.float8_e8m0fnu


def _swizzled(scales: Tensor) -> Tensor:
    return swizzle_32_4_4(scales).to(torch.float8_e8m0fnu)


def _pad_rows(quantized: Quantized) -> Quantized:
    """Rows of zeros at the end: the tokens of an expert are any number."""
    scales, padding = quantized.inverse_scales, (0, 0, 0, -len(quantized.values) % ALIGNMENT)
    scales = (
        F.pad(scales, padding) if quantized.block[0] == 1 and not is_swizzled(scales) else scales
    )
    return Quantized(_pad(quantized.values, padding), scales, quantized.block)


def _pad_k(quantized: Quantized) -> Tensor:
    """The values, with zeros along K."""
    values, unit = quantized.values, max(ALIGNMENT, quantized.block[1] or 1)
    return _pad(values, (0, -values.shape[1] % unit))


def _pad(values: Tensor, padding: tuple[int, ...]) -> Tensor:
    """fp8 values with zeros at the ends; the byte 0 is 0.0."""
    return F.pad(values.view(torch.uint8), padding).view(values.dtype) if any(padding) else values


def grouped_by_torch(a: Quantized, b: Quantized, *, offs: Tensor, sums: bool) -> Tensor:
    """The products of all experts, in bf16: [T, K], [E * N, K] -> [T, N], or [M, T], [N, T] -> [E,
    M, N].

    Args:
        a: with a scale per tensor, which is a scale per expert, or per row.
        b: alike.
        offs: [E] int32, the end of each expert's tokens.
        sums: whether tokens are summed over, those of each expert from a multiple of 16 on.
    """
    functional: Any = F
    row_wise, none = functional.ScalingType.RowWise, functional.SwizzleType.NO_SWIZZLE
    rows, columns, experts = len(a.values), len(b.values), len(offs)
    if sums:
        shapes, right = ((experts, rows), (experts, columns)), b.values.t()
        offs = (
            ((offs.diff(prepend=offs.new_zeros(1)) + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT)
            .cumsum(0)
            .int()
        )
    else:
        shapes, right = (
            ((rows, 1), (experts, columns // experts)),
            b.values.unflatten(0, (experts, -1)).mT,
        )
    if a.values.numel() == 0:  # torch refuses most strides of an empty matrix
        return a.values.new_zeros(
            (experts, rows, columns) if sums else (0, columns // experts), dtype=torch.bfloat16
        )
    scales = [each.inverse_scales for each in (a, b)]
    if a.block == (None, None) and not sums:
        positions = torch.arange(rows, device=offs.device, dtype=offs.dtype)
        scales[0] = scales[0][
            torch.searchsorted(offs, positions, right=True).clamp(max=experts - 1)
        ]
    scale_a, scale_b = (
        scale.view(shape[0], -1).expand(shape).contiguous()
        for scale, shape in zip(scales, shapes, strict=True)
    )
    if sums:
        scale_a, scale_b = scale_a.flatten(), scale_b.flatten()
    out: Tensor = functional.scaled_grouped_mm(
        a.values, right, scale_a.view(-1), row_wise, scale_b, row_wise, none, none, offs=offs,
        output_dtype=torch.bfloat16,
    )  # fmt: skip
    return out
