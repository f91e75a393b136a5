"""RMSNorm (Zhang and Sennrich 2019) by a factor per row, for kernels that compute it themselves.

    rms_factors     x [..., H] -> 1 / sqrt(mean(x^2) + eps) [..., 1], fp32
    rms_gradients   the gradients of x * factors * weight

With r the factor of a row and n = x * r: out = n * w, and for the gradient g of out

    grad_x = r * (g * w - n * mean(g * w * n))
    grad_w = sum over rows of g * n
"""

import torch
from torch import Tensor

from nanotrain.comm.autograd import eager_or_graph
from nanotrain.precision.dtypes import as_fp32


def _factors(x: Tensor, *, eps: float) -> Tensor:
    """One operator reads x."""
    wide = torch.promote_types(x.dtype, torch.float32)
    factors = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    factors.square_()
    factors /= x.shape[-1]
    factors += eps
    return factors.rsqrt_()


def _factors_in_graph(x: Tensor, *, eps: float) -> Tensor:
    """As torch's compiler decomposes an RMSNorm."""
    squares = as_fp32(x).pow(2)
    mean = squares.mean(-1, keepdim=True)
    return torch.rsqrt(mean + eps)


rms_factors = eager_or_graph(_factors, _factors_in_graph)


def _gradients(
    grad: Tensor, *, x: Tensor, weight: Tensor, factors: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of x and weight, by torch's kernels."""
    if grad.device.type == "cpu":
        return _gradients_on_cpu(grad, x=x, weight=weight, factors=factors)
    wide = torch.promote_types(x.dtype, weight.dtype)
    grad_x, grad_weight = torch.ops.aten._fused_rms_norm_backward(
        grad.to(wide), x.to(wide), [x.shape[-1]], factors, weight, [True, True]
    )
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


def _gradients_on_cpu(
    grad: Tensor, *, x: Tensor, weight: Tensor, factors: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of a LayerNorm of mean 0, which lacks one term of its own mean.

    LayerNorm's backward at mean 0 differs by a term -r * mean(g * w) in grad_x, which is added
    back.
    """
    grad32 = as_fp32(grad)
    weight32 = as_fp32(weight)
    size = x.shape[-1]
    grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
        grad32,
        as_fp32(x),
        [size],
        torch.zeros_like(factors),
        factors,
        weight32,
        None,
        [True, True, False],
    )
    mean_term = grad32 @ weight32
    mean_term = mean_term[..., None]
    mean_term *= factors
    mean_term /= size
    grad_x += mean_term
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


def _gradients_in_graph(
    grad: Tensor, *, x: Tensor, weight: Tensor, factors: Tensor
) -> tuple[Tensor, Tensor]:
    """As torch's compiler decomposes the backward of an RMSNorm."""
    grad32 = as_fp32(grad)
    weight32 = as_fp32(weight)
    x32 = as_fp32(x)
    scaled = grad32 * weight32
    normalized = x32 * factors
    along = normalized * scaled
    total = along.sum(-1, keepdim=True)
    share = normalized / x.shape[-1]
    share = share * total
    grad_x = scaled - share
    grad_x = grad_x * factors
    rows = tuple(range(x.dim() - 1))
    grad_weight = grad32 * normalized
    grad_weight = grad_weight.sum(rows)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


rms_gradients = eager_or_graph(_gradients, _gradients_in_graph)
