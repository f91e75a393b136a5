"""Quantization of matrices to NVFP4: e2m1 values with scales on two levels.

    value = e2m1 number * e4m3 scale of its block * fp32 scale of the tensor

    e2m1             0, 0.5, 1, 1.5, 2, 3, 4, 6 and the negative numbers: 4 bits
    block            1 x 16 of activations and gradients, 16 x 16 of weights, so that a weight and
                     its transposed form have the same values
    tensor scale     maps the amax of the tensor to 6 * 448, the largest product of the two formats

    tensor_amaxes    x [T, K] -> the amaxes of x and of its transformed form
    cast_rows        x [R, K] -> `Nvfp4`; cast_columns: its transformed form
    quantize_nvfp4   both of them, from random words of elements
    round_e2m1       to the nearest number, or to one of both neighbours at random
    hadamard         the random Hadamard transform of 16 consecutive values of a row

Stochastic rounding takes the upper neighbour with the probability (x - lower) / (upper - lower), so
that the expectation of a rounded value is the value. The transform is orthogonal: of two operands
that are both transformed along the dimension that a product sums over, the product is the same,
while an outlier is spread over 16 values.

Source: NVIDIA 2025, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), section 4
and appendix C; scales as in Transformer Engine's `NVFP4BlockScaling`.

triton_nvfp4.py has kernels of the first three.

    R rows   K elements of a row that a product sums over   T tokens
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.kernels.fp8.quantize import block_amax
from nanotrain.kernels.fp8.rounding import ElementWords
from nanotrain.precision.fp8 import BLOCK_1X16, PER_TENSOR, Block

UNIT = 16  # elements of a row that share a scale, and size of the Hadamard matrix
E2M1_MAX = 6.0
E2M1_INVERSE = 0.1666666716337204  # 1 / 6 in fp32
E4M3_MAX = 448.0
FP32_MAX = torch.finfo(torch.float32).max
# One random draw, used for all layers and steps: both operands of a product need the same signs.
SIGNS = (1, -1, -1, 1, -1, 1, 1, 1, -1, 1, -1, -1, 1, 1, -1, 1)


@dataclass(frozen=True)
class Nvfp4:
    """A matrix in NVFP4, not packed: torch computes with e4m3, which has all numbers of e2m1."""

    values: Tensor  # [R, K] e4m3, numbers of e2m1
    block_scales: Tensor  # [R, K / 16 rounded up] e4m3, one per 16 elements of a row
    tensor_scale: Tensor  # [] fp32; NaN if an element is infinite or NaN

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.values)

    def scaled_values(self) -> Tensor:
        """[R, K] fp32, values times block scales, exact: the tensor scale is applied to sums."""
        factors = self.block_scales.float().repeat_interleave(UNIT, dim=1)
        return self.values.float() * factors[:, : self.values.shape[1]]

    def dequantize(self) -> Tensor:
        """[R, K] fp32."""
        return self.scaled_values() * self.tensor_scale


@dataclass(frozen=True)
class PackedNvfp4:
    """A matrix in NVFP4 as torch's product takes it, padded with zeros."""

    values: Tensor  # [R padded to 16, K padded to 32 / 2] float4_e2m1fn_x2
    block_scales: Tensor  # e4m3 in the order of cuBLAS
    tensor_scale: Tensor  # [] fp32
    num_rows: int  # R


def tensor_amaxes(x: Tensor) -> Tensor:
    """[2] fp32, the amaxes of x [T, K] and of its transformed form; infinite with a NaN."""
    return torch.stack([matrix_amax(x), matrix_amax(transformed(x))])


def cast_rows(x: Tensor, amax: Tensor, *, block: Block, words: ElementWords | None = None) -> Nvfp4:
    """x [R, K] in NVFP4, for products that sum over K.

    Args:
        x: fp32 or bf16, of any strides.
        amax: [] amax of the tensor.
        block: (1, 16) or (16, 16).
        words: random words of the R tokens; None rounds to nearest.
    """
    element_words = None if words is None else words.expand(x.shape[1])
    return quantize_nvfp4(x, amax, block=block, words=element_words)


def cast_columns(x: Tensor, amax: Tensor, *, words: ElementWords | None = None) -> Nvfp4:
    """x [T, K] -> [K, T] after the Hadamard transform, for products that sum over tokens."""
    element_words = None if words is None else words.padded(UNIT).expand(x.shape[1]).t()
    return quantize_nvfp4(transformed(x), amax, block=BLOCK_1X16, words=element_words)


def transformed(x: Tensor) -> Tensor:
    """[T, K] -> [K, T rounded up to a multiple of 16], after the Hadamard transform of tokens."""
    return hadamard(pad_to_unit(x.t()))


def matrix_amax(x: Tensor) -> Tensor:
    """[], the amax of a matrix, 0 if it is empty; infinite if an element is infinite or NaN."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    return block_amax(x.detach(), PER_TENSOR).view(())


def quantize_nvfp4(x: Tensor, amax: Tensor, *, block: Block, words: Tensor | None = None) -> Nvfp4:
    """Cast x [R, K] to NVFP4.

    Args:
        x: fp32 or bf16, of any strides.
        amax: [] amax of the tensor of which x is a part or the whole.
        block: (1, 16) or (16, 16).
        words: [R, K] random 32-bit words of stochastic rounding; None rounds to nearest.
    """
    encode = tensor_encode_scale(amax)
    decode = 1 / encode
    scales = block_scales(block_amax(x, block), encode)
    factors = (1 / (scales.float() * decode)).clamp(max=FP32_MAX)
    rows = block[0] or 1
    if rows > 1:
        factors = factors.repeat_interleave(rows, dim=0)[: len(x)]
        scales = scales.repeat_interleave(rows, dim=0)[: len(x)]
    factors = factors.repeat_interleave(UNIT, dim=1)[:, : x.shape[1]]
    values = round_e2m1(x.float() * factors, words=words)
    packed = values.to(torch.float8_e4m3fn)
    return Nvfp4(packed.contiguous(), scales, tensor_decode_scale(amax))


def tensor_encode_scale(amax: Tensor) -> Tensor:
    """The fp32 factor of a tensor before its blocks are scaled; 1 for a tensor of zeros.

    >>> tensor_encode_scale(torch.tensor([2688.0, 1.0, 0.0])).tolist()
    [1.0, 2688.0, 1.0]
    """
    factor = E2M1_MAX * E4M3_MAX / amax
    factor = factor.clamp(max=FP32_MAX)
    is_known = (amax > 0) & (factor > 0)
    return torch.where(is_known, factor, 1.0)


def tensor_decode_scale(amax: Tensor) -> Tensor:
    """The tensor scale, 1 / `tensor_encode_scale`; NaN for an amax that is not finite."""
    scale = 1 / tensor_encode_scale(amax)
    return torch.where(amax.isfinite(), scale, torch.nan)


def block_scales(amax: Tensor, encode: Tensor) -> Tensor:
    """e4m3 scales with which the amaxes of blocks become 6, rounded to nearest.

    >>> block_scales(torch.tensor([6.0, 3.0, 0.0]), torch.tensor(448.0)).float().tolist()
    [448.0, 224.0, 0.0]
    """
    per_unit = encode * E2M1_INVERSE  # as Transformer Engine's kernels
    # some torch versions cast values out of range to NaN
    return (amax * per_unit).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)


def round_e2m1(x: Tensor, *, words: Tensor | None = None) -> Tensor:
    """The numbers of e2m1 that x is rounded to, in fp32; values beyond 6 are clamped.

    A tie goes to the number with an even mantissa.

    Args:
        x: fp32.
        words: int64 below 2^32, one per element; None rounds to nearest.

    >>> round_e2m1(torch.tensor([0.25, 0.75, -2.5, 5.0, 5.1, 9.0])).tolist()
    [0.0, 1.0, -2.0, 4.0, 6.0, 6.0]
    """
    magnitude = x.abs().clamp(max=E2M1_MAX)
    # numbers are 0.5 apart below 2, 1 below 4, 2 below 6
    distance = torch.where(magnitude < 4, 1.0, 2.0)
    distance = torch.where(magnitude < 2, 0.5, distance)
    count = magnitude / distance
    if words is None:
        whole = count.round()
    else:
        lower = count.floor()
        uniform = (words >> 8) * 2.0**-24  # [0, 1), exact in fp32
        whole = lower + (uniform < count - lower)
    return (whole * distance).copysign(x)


def hadamard(x: Tensor) -> Tensor:
    """x [R, K] with 16 consecutive values of each row transformed, in the dtype of x.

    K is a multiple of 16.
    """
    groups = x.float().unflatten(1, (x.shape[1] // UNIT, UNIT))
    return (groups @ hadamard_matrix(x.device)).flatten(1).to(x.dtype)


@cache
def hadamard_matrix(device: torch.device) -> Tensor:
    """[16, 16] fp32, orthogonal: a Hadamard matrix with random signs of its rows, divided by 4."""
    matrix = torch.ones(1, 1)
    while len(matrix) < UNIT:
        upper = torch.cat([matrix, matrix], dim=1)
        lower = torch.cat([matrix, -matrix], dim=1)
        matrix = torch.cat([upper, lower])
    signs = torch.tensor(SIGNS, dtype=torch.float32)
    return (signs[:, None] * matrix / UNIT**0.5).to(device)


def pad_to_unit(x: Tensor) -> Tensor:
    """x [R, K] with zeros up to a multiple of 16 elements per row."""
    missing = -x.shape[1] % UNIT
    return F.pad(x, (0, missing)) if missing else x
