"""Norms and elementwise functions whose results do not depend on the layout (`--invariant`).

per_token           a weight for every token, whose gradient is an exact sum
norms               by rows
InWholeVectors      elementwise functions on whole vectors: kernels compute the last elements of a
                    tensor by another formula

    B batch   S sequence   H channels
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.kernels.exact_sums import VECTOR_ELEMENTS, token_sum
from nanotrain.model.norm import LayerNorm, RMSNorm
from nanotrain.parallel.tp.invariant import UnitBlocks
from nanotrain.precision.dtypes import as_fp32


class _PerToken(torch.autograd.Function):
    """A weight [H] for every token, whose gradient is an exact sum over tokens."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, shape: torch.Size, num_addends: int) -> Tensor:
        """[H] -> [..., H]."""
        ctx.num_addends = num_addends
        return weight.expand(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """[..., H] -> [H] fp64."""
        return token_sum(grads[0], num_addends=ctx.num_addends), None, None


def per_token(weight: Tensor, x: Tensor, *, blocks: UnitBlocks) -> Tensor:
    """[H] -> the shape of x, [B, S, H] or [B, S, heads, H]; the gradient is an exact sum."""
    num_addends = blocks.num_tokens * (blocks.num_heads if x.ndim > 3 else 1)
    out: Tensor = _PerToken.apply(weight, x.shape, num_addends)
    return out


def invariant_rms_norm(norm: RMSNorm, x: Tensor, *, blocks: UnitBlocks) -> Tensor:
    """`RMSNorm.forward` [..., H] -> [..., H], with an exact sum for the gradient of the weight."""
    x32 = as_fp32(x).contiguous()
    normalized = normalized_rows(x32, norm.eps)
    return scaled(normalized, norm.weight, is_offset=norm.is_offset, blocks=blocks).to(x.dtype)


def normalized_rows(x: Tensor, eps: float) -> Tensor:
    """[..., H] fp32 divided by the root of the mean square of every row."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def invariant_layer_norm(norm: LayerNorm, x: Tensor, *, blocks: UnitBlocks) -> Tensor:
    """`LayerNorm.forward` [..., H] -> [..., H], with exact sums for gradients of parameters."""
    x32 = as_fp32(x).contiguous()
    normalized = F.layer_norm(x32, x.shape[-1:], eps=norm.eps)
    out = scaled(normalized, norm.weight, is_offset=norm.is_offset, blocks=blocks)
    if norm.bias is not None:
        out = out + per_token(norm.bias, x, blocks=blocks)
    return out.to(x.dtype)


def scaled(
    normalized: Tensor, weight: Tensor | None, *, is_offset: bool, blocks: UnitBlocks
) -> Tensor:
    """Normalized rows times the weight, or 1 + weight."""
    if weight is None:
        return normalized
    factors = per_token(weight, normalized, blocks=blocks)
    return normalized * (factors + 1 if is_offset else factors)


@dataclass(frozen=True)
class InWholeVectors:
    """An elementwise function of tensors of one shape, computed on whole vectors."""

    function: Callable[..., Tensor]

    def __call__(self, *inputs: Tensor) -> Tensor:
        """[...] each -> [...]."""
        shape = inputs[0].shape
        padding = -shape.numel() % VECTOR_ELEMENTS
        flat = []
        for x in inputs:
            elements = x.reshape(-1)
            flat.append(F.pad(elements, (0, padding)) if padding else elements)
        return self.function(*flat)[: shape.numel()].view(shape)
