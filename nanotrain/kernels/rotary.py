"""The rotation of RoPE: one Triton kernel, or torch's operators. Its backward is the rotation by the negative angle.

    pair i of a head   (x[i], x[i + P]) -> (x[i] cos_i - x[i + P] sin_i, x[i + P] cos_i + x[i] sin_i)
    other channels     stay

bytes per element in bf16, in either direction     torch: two products, two products added in place = 10
                                                   Triton: 2 read, 2 written = 4

    B batch   S sequence   N heads   D width of a head   P pairs (2 P <= D)
"""

from typing import Any

import torch
from torch import Tensor

from nanotrain.kernels.choice import uses_triton


def rotate(x: Tensor, *, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every pair of every head by its angle.

    Args:
        x: [B, S, N, D].
        cos: [S, 1, P] or [B, S, 1, P], in the dtype of x; sin alike.
        sin: of the angles.

    Returns:
        [B, S, N, D], same dtype.
    """
    if torch.compiler.is_compiling():  # the compiler fuses the formula itself
        pairs = cos.shape[-1]
        low, high, rest = x.split((pairs, pairs, x.shape[-1] - 2 * pairs), dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)
    rotated: Tensor = _Rotate.apply(x, cos, sin)
    return rotated


class _Rotate(torch.autograd.Function):
    """Saves no activation, as the backward is the transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos=cos, sin=sin, sign=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos=cos, sin=sin, sign=-1), None, None


def _rotate(x: Tensor, *, cos: Tensor, sin: Tensor, sign: int, out: Tensor | None = None) -> Tensor:
    """Into `out`, by default new and contiguous memory."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if uses_triton(x):
        from nanotrain.kernels import triton_rotary

        return triton_rotary.rotate(x, cos=cos, sin=sin, sign=sign, out=out)
    return _by_torch(x, cos=cos, sin=sin, sign=sign, out=out)


def _by_torch(x: Tensor, *, cos: Tensor, sin: Tensor, sign: int, out: Tensor) -> Tensor:
    """Four passes over half of the channels."""
    pairs = cos.shape[-1]
    sizes = (pairs, pairs, x.shape[-1] - 2 * pairs)
    low, high, rest = x.split(sizes, dim=-1)
    out_low, out_high, out_rest = out.split(sizes, dim=-1)
    torch.mul(low, cos, out=out_low)
    out_low.addcmul_(high, sin, value=-sign)
    torch.mul(high, cos, out=out_high)
    out_high.addcmul_(low, sin, value=sign)
    out_rest.copy_(rest)
    return out
