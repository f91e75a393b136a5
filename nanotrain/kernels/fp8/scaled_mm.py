"""The products of fp8 matrices.

    scaled_mm           a [M, K], b [N, K]       -> a b^T [M, N]
    Groups              which tokens belong to which expert, on the device
    multiply_tokens     a [T, K], b [E, N, K]    -> [T, N], of each token with the matrix of its expert
    multiply_matrices   a [T, M], b [T, N]       -> [E, M, N], one product over the tokens of each expert

On CUDA they are torch's, which takes a block size of each operand and the scales in a layout of its own. Other devices
emulate them: fp8 values are multiplied exactly and summed in fp32.

    block of a, b       kernel
    (None, None)        TensorWise
    (1, None)           RowWise, also of torch's grouped product: fp8 rows [M, K] and columns [K, N] of each expert
    (1, 128)            BlockWise1x128
    (128, 128)          BlockWise128x128
    (1, 32)             BlockWise1x32, scales in e8m0

    tokens       | expert 0 | expert 1       | dropped |
    padded       | expert 0 |..| expert 1       |.| dropped | ...      torch sums over multiples of 16 tokens
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.kernels.fp8.quantize import Quantized
from nanotrain.kernels.grouped import GroupedMM
from nanotrain.kernels.linear import add_cast
from nanotrain.precision.fp8 import Block

ALIGNMENT = 16  # torch's kernels take sizes that are multiples of this; M and K are padded here, K also to whole blocks


def scaled_mm(a: Quantized, b: Quantized, *, dtype: torch.dtype) -> Tensor:
    """[M, K], [N, K] -> [M, N] in `dtype`; without tokens (an expert that no token chose) empty or zero."""
    if a.values.numel() == 0:
        return torch.zeros(len(a.values), len(b.values), dtype=dtype, device=a.values.device)
    if a.values.device.type == "cpu":
        return emulate(a, b, dtype=dtype)
    operands, blocks = packed(a, b)
    return fp8_mm(operands, blocks=blocks, dtype=dtype)


@torch.library.custom_op("nanotrain::fp8_mm", mutates_args=())
def fp8_mm(operands: Sequence[Tensor], *, blocks: Sequence[int], dtype: torch.dtype) -> Tensor:
    """`multiply_by_kernel` as a node of graphs: torch's compiler has no form of its own for most blocks."""
    a, b = unpacked(operands, blocks)
    return multiply_by_kernel(a, b, dtype=dtype)


def packed(a: Quantized, b: Quantized) -> tuple[list[Tensor], list[int]]:
    """Two matrices as operators take them: tensors, and sizes of blocks with 0 for all."""
    return [a.values, a.inverse_scales, b.values, b.inverse_scales], [size or 0 for size in (*a.block, *b.block)]


def unpacked(operands: Sequence[Tensor], blocks: Sequence[int]) -> tuple[Quantized, Quantized]:
    """The inverse of `packed`."""
    (a, scales_a, b, scales_b), sizes = operands, [size or None for size in blocks]
    return Quantized(a, scales_a, (sizes[0], sizes[1])), Quantized(b, scales_b, (sizes[2], sizes[3]))


@fp8_mm.register_fake
def _(operands: Sequence[Tensor], *, blocks: Sequence[int], dtype: torch.dtype) -> Tensor:
    return operands[0].new_empty((len(operands[0]), len(operands[2])), dtype=dtype)


def write_scaled_mm(a: Quantized, b: Quantized, *, out: Tensor, adds: bool) -> None:
    """[M, K], [N, K] -> `out` [M, N]; written, or added to what it holds."""
    is_wide = a.values.device.type == "cpu" or a.block == (None, None)  # kernels of other blocks return bf16
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


def multiply_by_kernel(a: Quantized, b: Quantized, *, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """The product by torch's kernel, in `out` where it is given; precision/fp8.py has the devices of each recipe."""
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
    given = (_pad_k(a), _pad_k(b).t(), scales_a, recipe_a, swizzles, [scales_b], recipe_b, swizzles, None, kernel_dtype)
    multiply: Any = torch.ops.aten._scaled_mm_v2
    product: Tensor = multiply(*given) if out is None else multiply.out(*given, out=out)
    return product[:num_rows].to(dtype)


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
    scales = F.pad(scales, padding) if quantized.block[0] == 1 and not is_swizzled(scales) else scales
    return Quantized(_pad(quantized.values, padding), scales, quantized.block)


def _pad_k(quantized: Quantized) -> Tensor:
    """The values, with zeros along K."""
    values, unit = quantized.values, max(ALIGNMENT, quantized.block[1] or 1)
    return _pad(values, (0, -values.shape[1] % unit))


def _pad(values: Tensor, padding: tuple[int, ...]) -> Tensor:
    """fp8 values with zeros at the ends; the byte 0 is 0.0."""
    return F.pad(values.view(torch.uint8), padding).view(values.dtype) if any(padding) else values


_PRODUCTS = GroupedMM()


@dataclass(frozen=True)
class Groups:
    """The tokens of each expert."""

    offs: Tensor  # [E] int32, the end of each expert's tokens
    experts: Tensor  # [T] int64, the expert of each token; E for a dropped one

    @classmethod
    def of(cls, offs: Tensor, *, num_tokens: int) -> Self:
        """The groups of `num_tokens` tokens sorted by expert, without a host sync."""
        positions = torch.arange(num_tokens, device=offs.device, dtype=offs.dtype)
        return cls(offs, torch.searchsorted(offs, positions, right=True))

    def per_token(self, per_expert: Tensor) -> Tensor:
        """[E, n] -> [T, n]; dropped tokens get those of the last expert."""
        return per_expert[self.experts.clamp(max=len(self.offs) - 1)]

    def largest(self, per_token: Tensor) -> Tensor:
        """[T, n], not negative -> [E, n], the largest of each expert's tokens; 0 without any."""
        found = per_token.new_zeros(len(self.offs) + 1, per_token.shape[1])
        index = self.experts[:, None].expand_as(per_token)
        return found.scatter_reduce_(0, index, per_token, "amax")[:-1]

    def pad(self) -> tuple[Tensor, Tensor, int]:
        """Pad every expert to a multiple of 16 tokens: the new offsets, the new row of each token, and all rows."""
        starts = F.pad(self.offs, (1, 0))  # of each expert, and of the dropped tokens
        counts = starts.diff()
        padded = F.pad((counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT, (1, 0)).cumsum(0)
        rows = torch.arange(len(self.experts), device=starts.device) + (padded - starts)[self.experts]
        length = len(self.experts) + ALIGNMENT * len(self.offs)  # enough whatever the counts are
        return padded[1:].int(), rows, -(-length // ALIGNMENT) * ALIGNMENT


def multiply_tokens(a: Quantized, b: Quantized, *, groups: Groups, dtype: torch.dtype) -> Tensor:
    """[T, K], [E * N, K] with a scale per row -> [T, N] in `dtype`; rows of dropped tokens are undefined."""
    matrices, scales = b.values.unflatten(0, (len(groups.offs), -1)), b.inverse_scales.view(len(groups.offs), -1)
    if a.values.is_cuda:
        return _multiply(a.values, matrices.mT, scales=(a.inverse_scales[:, 0], scales), offs=groups.offs).to(dtype)
    out = _PRODUCTS.multiply(a.values.float(), matrices.float().mT, offs=groups.offs)
    return out.mul_(a.inverse_scales).mul_(groups.per_token(scales)).to(dtype)


def multiply_matrices(a: Quantized, b: Quantized, *, groups: Groups, dtype: torch.dtype) -> Tensor:
    """[T, M], [T, N] with scales [E, M] and [E, N], or [E, 1] -> [E, M, N] in `dtype`."""
    if a.values.is_cuda:
        offs, rows, length = groups.pad()
        values = [_scatter_rows(x.values, rows, length=length).t().contiguous() for x in (a, b)]
        rows_a, rows_b = (x.inverse_scales.expand(-1, x.values.shape[1]).flatten() for x in (a, b))
        return _multiply(values[0], values[1].t(), scales=(rows_a, rows_b), offs=offs).to(dtype)
    out = _PRODUCTS.multiply(a.values.float().t(), b.values.float(), offs=groups.offs)
    return out.mul_(a.inverse_scales[:, :, None]).mul_(b.inverse_scales[:, None]).to(dtype)


def _multiply(a: Tensor, b: Tensor, *, scales: tuple[Tensor, Tensor], offs: Tensor) -> Tensor:
    functional: Any = F
    row_wise, none = functional.ScalingType.RowWise, functional.SwizzleType.NO_SWIZZLE
    scale_a, scale_b = (scale.contiguous() for scale in scales)
    out: Tensor = functional.scaled_grouped_mm(
        a, b, scale_a, row_wise, scale_b, row_wise, none, none, offs=offs, output_dtype=torch.bfloat16
    )
    return out


def _scatter_rows(values: Tensor, rows: Tensor, *, length: int) -> Tensor:
    """fp8 rows at new places among rows of zeros; the byte 0 is 0.0."""
    padded = torch.zeros(length, values.shape[1], dtype=torch.uint8, device=values.device)
    return padded.index_copy_(0, rows, values.view(torch.uint8)).view(values.dtype)
