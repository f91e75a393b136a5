"""Quantization of matrices to fp8: amaxes of blocks, scales, and the cast.

    block_amax       x [R, K] -> the amax of each block
    inverse_scales   amaxes -> the factors that turn fp8 values back
    quantize         x, inverse scales -> `Quantized`
    cast             the steps above in one, for x and x transposed; kernels/fp8/triton_cast.py is the kernel of it

    x [R, K]                 amax, inverse scales      block (1, None): one per row
    +-----+-----+-----+      +---+---+---+             block (None, None): one
    |  block (r, k)   |  ->  |   |   |   |             block (128, 128): R/128 x K/128
    +-----+-----+-----+      +---+---+---+

The last block of a row or column may be smaller. Values beyond the range of the format are clamped;
infinities and NaN make the whole result NaN, so that a step with them is skipped and not trained
on.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.precision.fp8 import Block

# Smaller amaxes get the scale of this one: the inverse scale stays a normal fp32 number.
MIN_AMAX = 2.0**-100


@dataclass(frozen=True)
class Quantized:
    """A matrix in fp8."""

    values: Tensor  # [R, K] fp8, contiguous
    # [R / r, K / k] fp32: the represented value is value * inverse scale of its block
    inverse_scales: Tensor
    block: Block  # (r, k)

    def dequantize(self) -> Tensor:
        """[R, K] fp32."""
        return self.values.float() * _expand(
            self.inverse_scales, self.values.shape, block=self.block
        )


@dataclass(frozen=True)
class Cast:
    """How an operand is cast, and for which products."""

    block: Block
    dtype: torch.dtype
    power_of_two: bool = False
    rows: bool = True  # as it is, for products that sum over its columns
    columns: bool = False  # transposed, for those that sum over its rows


Forms = tuple[Quantized | None, Quantized | None]


def cast(x: Tensor, how: Cast, *, inverse: Tensor | None = None) -> Forms:
    """Both forms of x [R, K]; `inverse` [1] is the scale of the whole tensor, None where a recipe
    has blocks.
    """
    forms: list[Quantized | None] = [None, None]
    for index, (is_wanted, matrix) in enumerate(((how.rows, x), (how.columns, x.t()))):
        if is_wanted:
            scales = inverse
            if scales is None:
                scales = inverse_scales(
                    block_amax(matrix, how.block), how.dtype, power_of_two=how.power_of_two
                )
            forms[index] = quantize(
                matrix,
                scales.view(1, 1) if inverse is not None else scales,
                block=how.block,
                dtype=how.dtype,
            )
    return forms[0], forms[1]


def block_amax(x: Tensor, block: Block) -> Tensor:
    """The largest absolute value of each block of x [R, K]: [R / r, K / k] fp32, inf for a block
    with a NaN.
    """
    rows, columns = (size or length for size, length in zip(block, x.shape, strict=True))
    if x.numel() == 0:
        return x.new_zeros(
            (_count(x.shape[0], rows), _count(x.shape[1], columns)), dtype=torch.float32
        )
    if block == (None, None):
        # without a copy of x; NaN stays NaN
        amax = torch.stack(x.aminmax()).abs().amax().view(1, 1)
    else:
        padding = (0, -x.shape[1] % columns, 0, -x.shape[0] % rows)
        padded = F.pad(x, padding) if any(padding) else x  # torch copies x also to pad by nothing
        amax = padded.abs().unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).amax((1, 3))
    return amax.float().nan_to_num(nan=torch.inf, posinf=torch.inf)


def inverse_scales(amax: Tensor, dtype: torch.dtype, *, power_of_two: bool) -> Tensor:
    """The smallest factors with which a format reaches the amaxes; NaN where an amax is not finite.

    >>> inverse_scales(torch.tensor([448.0, 3.5]), torch.float8_e4m3fn, power_of_two=False).tolist()
    [1.0, 0.0078125]
    >>> inverse_scales(torch.tensor([449.0, 3.0]), torch.float8_e4m3fn, power_of_two=True).tolist()
    [2.0, 0.0078125]
    """
    factors = amax.clamp(min=MIN_AMAX) / torch.finfo(dtype).max
    if power_of_two:
        mantissa, exponent = factors.frexp()  # 0.5 <= mantissa < 1
        factors = torch.ldexp(torch.ones_like(factors), exponent - (mantissa == 0.5).int())
    return torch.where(amax.isfinite(), factors, torch.nan)


def quantize(x: Tensor, inverse: Tensor, *, block: Block, dtype: torch.dtype) -> Quantized:
    """Cast x [R, K] to fp8.

    Args:
        x: fp32, bf16 or fp16, of any strides.
        inverse: [R / r, K / k] fp32, inverse scales.
        block: (r, k).
        dtype: dtype of the result.
    """
    largest = torch.finfo(dtype).max
    scaled = x.float() / _expand(inverse, x.shape, block=block)
    # Some torch versions cast what is out of range to NaN.
    values = scaled.clamp_(-largest, largest).to(dtype).contiguous()
    return Quantized(values, inverse, block)


def _expand(per_block: Tensor, shape: torch.Size, *, block: Block) -> Tensor:
    """One number per block -> one per element, [R, K] or what broadcasts to it."""
    for dim, size in enumerate(block):
        if size is not None and size > 1:
            per_block = per_block.repeat_interleave(size, dim).narrow(dim, 0, shape[dim])
    return per_block


def _count(length: int, size: int) -> int:
    return -(-length // size) if length else 0
