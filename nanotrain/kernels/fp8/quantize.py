"""Quantization of matrices to fp8: amaxes of blocks, scales, and the cast.

    block_amax       x [R, K] -> the amax of each block
    inverse_scales   amaxes -> the factors that turn fp8 values back
    quantize         x, inverse scales -> `Quantized`
    cast             the steps above in one, for x and x transposed; triton_cast.py is its kernel

    x [R, K]                 amax, inverse scales      block (1, None): one per row
    +-----+-----+-----+      +---+---+---+             block (None, None): one
    |  block (r, k)   |  ->  |   |   |   |             block (128, 128): R/128 x K/128
    +-----+-----+-----+      +---+---+---+

The last block of a row or column may be smaller. Values beyond the range of the format are clamped;
infinities and NaN make the whole result NaN, so that a step with them is skipped and not trained
on.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.precision.fp8 import PER_TENSOR, Block

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
        factors = _expand_blocks(self.inverse_scales, self.values.shape, block=self.block)
        return self.values.float() * factors


class SwigluInput(NamedTuple):
    """An operand silu(gate) * up that casts compute."""

    gate: Tensor  # [R, K], contiguous
    up: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to which products are rounded before they are cast."""
        return self.gate.dtype

    def value(self) -> Tensor:
        """[R, K], by torch's operators."""
        return F.silu(self.gate).mul_(self.up)


class NormInput(NamedTuple):
    """An operand x * row_factors * weight, an RMSNorm that casts compute."""

    x: Tensor  # [R, K]
    row_factors: Tensor  # [R, 1] fp32
    weight: Tensor  # [K]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to which products are rounded before they are cast."""
        return self.x.dtype

    def value(self) -> Tensor:
        """[R, K], by torch's operators."""
        return (self.x.float() * self.row_factors).mul_(self.weight).to(self.x.dtype)


# An operand that casts compute as they read it, so that it is not written in 16 bits.
ComputedInput = SwigluInput | NormInput


@dataclass(frozen=True)
class Cast:
    """Options of casting an operand, and the products that it is cast for."""

    block: Block
    dtype: torch.dtype
    power_of_two: bool = False
    rows: bool = True  # not transposed, for products that sum over its columns
    columns: bool = False  # transposed, for products that sum over its rows


class Forms(NamedTuple):
    """An operand in fp8."""

    rows: Quantized | None  # not transposed, for products that sum over its columns
    columns: Quantized | None  # transposed, for products that sum over its rows

    def get(self, *, transposed: bool = False) -> Quantized:
        """The transposed or untransposed form, which must have been cast."""
        form = self.columns if transposed else self.rows
        assert form is not None, "only forms that were cast are used"
        return form

    def rescaled(self, scales: Tensor) -> "Forms":
        """The same values with other inverse scales."""
        rows = self.rows
        if rows is not None:
            rows = replace(rows, inverse_scales=scales)
        columns = self.columns
        if columns is not None:
            columns = replace(columns, inverse_scales=scales)
        return Forms(rows, columns)


def cast(x: Tensor, how: Cast, *, inverse: Tensor | None = None) -> Forms:
    """Both forms of x [R, K].

    Args:
        x: the operand.
        how: blocks, dtype and the forms that are cast.
        inverse: [1] inverse scale of the whole tensor; None where a recipe has blocks.
    """
    rows = None
    columns = None
    if how.rows:
        rows = _cast_matrix(x, how, inverse=inverse)
    if how.columns:
        columns = _cast_matrix(x.t(), how, inverse=inverse)
    return Forms(rows, columns)


def _cast_matrix(x: Tensor, how: Cast, *, inverse: Tensor | None) -> Quantized:
    """x [R, K] in fp8, with the given scale or with scales from the amax of each block."""
    if inverse is not None:
        scales = inverse.view(1, 1)
    else:
        amax = block_amax(x, how.block)
        scales = inverse_scales(amax, how.dtype, power_of_two=how.power_of_two)
    return quantize(x, scales, block=how.block, dtype=how.dtype)


def block_amax(x: Tensor, block: Block) -> Tensor:
    """The largest absolute value of each block of x [R, K]: [R / r, K / k] fp32.

    It is infinite for a block with a NaN.
    """
    num_rows, num_columns = x.shape
    rows = block[0] or num_rows
    columns = block[1] or num_columns
    if x.numel() == 0:
        counts = (_count_blocks(num_rows, rows), _count_blocks(num_columns, columns))
        return x.new_zeros(counts, dtype=torch.float32)
    if block == PER_TENSOR:
        # without a copy of x; NaN stays NaN
        amax = torch.stack(x.aminmax()).abs().amax().view(1, 1)
    else:
        padding = (0, -num_columns % columns, 0, -num_rows % rows)
        padded = F.pad(x, padding) if any(padding) else x  # torch copies x also to pad by nothing
        blocks = padded.abs().unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        amax = blocks.amax((1, 3))
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
        exponent = exponent - (mantissa == 0.5).int()
        factors = torch.ldexp(torch.ones_like(factors), exponent)
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
    scaled = x.float() / _expand_blocks(inverse, x.shape, block=block)
    # Some torch versions cast values out of range to NaN.
    values = scaled.clamp_(-largest, largest).to(dtype).contiguous()
    return Quantized(values, inverse, block)


def _expand_blocks(per_block: Tensor, shape: torch.Size, *, block: Block) -> Tensor:
    """One number per block -> one per element, [R, K] or a shape that broadcasts to it."""
    for dim, size in enumerate(block):
        if size is not None and size > 1:
            per_block = per_block.repeat_interleave(size, dim).narrow(dim, 0, shape[dim])
    return per_block


def _count_blocks(length: int, size: int) -> int:
    """Blocks of `size` in `length`; none of size 0."""
    return -(-length // size) if length else 0
