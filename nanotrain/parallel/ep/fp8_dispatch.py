"""Tokens in fp8 on their way to their experts: cast before the all-to-all, with their scales.

    row sent   [H values in e4m3 | one e8m0 byte per block of the recipe]

A cast in blocks within a token depends on that token only, and a scale that is a power of two
changes no value that is cast again. So the products of the experts have the operands that a cast
after the all-to-all has, for a row of H + H / 128 bytes in place of 2 H (blockwise). The weight
gradients read the tokens that arrived, with values of fp8. Gradients are sent in their own dtype.

Source: DeepSeek-V3 (2024), section 3.3.3.

    R rows   H hidden
"""

import torch
from torch import Tensor

from nanotrain.comm.all_to_all import Encoding
from nanotrain.kernels.fp8.layer import Fp8Options, Operand
from nanotrain.kernels.fp8.quantize import Cast, Quantized, cast
from nanotrain.precision.fp8 import Block

SCALE = torch.float8_e8m0fnu


def dispatch_encoding(options: Fp8Options | None) -> Encoding | None:
    """The encoding of tokens for experts with these options; None: tokens in their own dtype."""
    if options is None or not options.sends_tokens:
        return None
    recipe = options.recipe
    dtype = options.dtype(Operand.INPUT)
    how = Cast(recipe.block, dtype, recipe.power_of_two)

    def encode(rows: Tensor) -> Tensor:
        return encode_rows(rows, how)

    def decode(payload: Tensor, like: Tensor) -> Tensor:
        return decode_rows(payload, how, like=like)

    return Encoding(encode, decode)


def encode_rows(rows: Tensor, how: Cast) -> Tensor:
    """[R, H] -> [R, bytes] uint8, values and scales."""
    quantized = cast(rows, how).get()
    scales = quantized.inverse_scales.to(SCALE)
    return torch.cat([quantized.values.view(torch.uint8), scales.view(torch.uint8)], dim=1)


def decode_rows(payload: Tensor, how: Cast, *, like: Tensor) -> Tensor:
    """[R, bytes] uint8 -> [R, H] in the dtype of `like` [R, H], exact."""
    width = like.shape[1]
    values = payload[:, :width].view(how.dtype)
    scales = payload[:, width:].view(SCALE).float()
    return Quantized(values, scales, how.block).dequantize().to(like.dtype)


def row_bytes(width: int, block: Block) -> int:
    """Bytes of a row of `width` values that is sent in fp8.

    >>> row_bytes(7168, (1, 128)), row_bytes(7168, (1, None))
    (7224, 7169)
    """
    size = block[1] or width
    return width + -(-width // size)
