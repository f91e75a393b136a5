"""Norms over the last dim, computed in fp32 whatever the activations are.

    build_norm   the norm that a configuration names
    LayerNorm, RMSNorm

torch has a fused LayerNorm on every device and a fused RMSNorm on CUDA. Its RMSNorm on the CPU is a chain of
elementwise kernels; here the backward uses the fused LayerNorm kernel instead (measured, 2048 x 384, forward and
backward on one core: fp32 4.3 -> 1.5 ms, bf16 5.3 -> 2.6 ms).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.config.config import ModelConfig, Normalization
from nanotrain.model.parameters import Parameters


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias (Ba et al. 2016)."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter, *, eps: float) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = weight, bias, eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], same dtype."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019)."""

    def __init__(self, weight: nn.Parameter, *, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], same dtype."""
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        out: Tensor = _RMSNormOnCPU.apply(x, self.weight, self.eps)
        return out


def build_norm(model_config: ModelConfig, params: Parameters) -> nn.Module:
    """The norm of a model.

    Args:
        model_config: kind and epsilon.
        params: weight, and the bias of a LayerNorm.
    """
    eps = model_config.norm_epsilon
    if model_config.normalization is Normalization.LayerNorm:
        return LayerNorm(params["weight"], params["bias"], eps=eps)
    return RMSNorm(params["weight"], eps=eps)


class _RMSNormOnCPU(torch.autograd.Function):
    """With r = 1 / sqrt(mean(x^2) + eps) and n = x * r: out = n * w, and for the gradient g of out

        grad_x = r * (g * w - n * mean(g * w * n))
        grad_w = sum over rows of g * n

    LayerNorm's backward at mean 0 differs by a term -r * mean(g * w) in grad_x, which is added back.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = _fp32(x)
        norm = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return torch.mul(x32, scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        grad, weight32, size = _fp32(grads[0]), _fp32(weight), x.shape[-1]
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, _fp32(x), [size], torch.zeros_like(scale), scale, weight32, None, [True, True, False]
        )
        grad_x += (grad @ weight32)[..., None].mul_(scale).div_(size)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def _fp32(x: Tensor) -> Tensor:
    """At least fp32; fp64 stays."""
    return x.float() if x.itemsize < 4 else x
