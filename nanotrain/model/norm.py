"""Norms over the last dim, computed in fp32 for every dtype of activations.

    build_norm   the norm that a configuration names
    build_post_norm   that of an output of attention or MLP, or a factor in its place
    build_scale   a constant factor
    LayerNorm, RMSNorm
    build_head_norm, WideRMSNorm   norms of queries and keys

With `apply_layernorm_1p` the stored weight is the difference from 1, which is added in fp32. torch
has a fused LayerNorm on every device, and a fused RMSNorm on GPUs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.comm.autograd import copy_to, reduce_from
from nanotrain.comm.group import Group
from nanotrain.config.model import ModelConfig
from nanotrain.model.parameters import Parameters
from nanotrain.precision.dtypes import as_fp32


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias (Ba et al. 2016)."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter, *, eps: float, is_offset: bool = False
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.eps, self.is_offset = weight, bias, eps, is_offset

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], same dtype."""
        if self.is_offset:
            weight, bias = as_fp32(self.weight) + 1, as_fp32(self.bias)
            return F.layer_norm(as_fp32(x), weight.shape, weight, bias, self.eps).to(x.dtype)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019); a weight of None is 1 (L2Norm)."""

    def __init__(self, weight: nn.Parameter | None, *, eps: float, is_offset: bool = False) -> None:
        super().__init__()
        self.weight, self.eps, self.is_offset = weight, eps, is_offset

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], same dtype."""
        weight = x.new_ones(x.shape[-1]) if self.weight is None else self.weight
        weight = as_fp32(weight) + 1 if self.is_offset else weight
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            out: Tensor = _RMSNormOnCPU.apply(x, weight, self.eps)
            return out
        return F.rms_norm(as_fp32(x) if self.is_offset else x, weight.shape, weight, self.eps).to(
            x.dtype
        )


class _RMSNormOnCPU(torch.autograd.Function):
    """Keeps its input and one number per row; torch's operators keep the input and the normalized
    rows in fp32 too.

    With r = 1 / sqrt(mean(x^2) + eps) and n = x * r: out = n * w, and for the gradient g of out

        grad_x = r * (g * w - n * mean(g * w * n))
        grad_w = sum over rows of g * n

    LayerNorm's backward at mean 0 differs by a term -r * mean(g * w) in grad_x, which is added
    back. Measured, 2048 x 384, forward and backward on one core: fp32 4.3 -> 1.5 ms, bf16 5.3 ->
    2.6 ms.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = as_fp32(x)
        norm = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return torch.mul(x32, scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        grad, weight32, size = as_fp32(grads[0]), as_fp32(weight), x.shape[-1]
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad,
            as_fp32(x),
            [size],
            torch.zeros_like(scale),
            scale,
            weight32,
            None,
            [True, True, False],
        )
        grad_x += (grad @ weight32)[..., None].mul_(scale).div_(size)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class WideRMSNorm(nn.Module):
    """RMSNorm over all heads together (OLMo 2), with the heads sharded over a group.

    The mean square is reduced over the group. Every rank holds the weights of all heads and uses
    those of its own, so the gradients of the weights have to be summed over the group.

    Args:
        weight: [all heads * D].
        eps: added to the mean square.
        heads: channels of this rank, as a range of the weight; each channel is on the same number
            of ranks.
        group: ranks over which the heads are sharded.
    """

    def __init__(
        self, weight: nn.Parameter, *, eps: float, heads: slice, group: Group, is_offset: bool
    ) -> None:
        super().__init__()
        self.weight, self.eps, self.heads, self.group, self.is_offset = (
            weight,
            eps,
            heads,
            group,
            is_offset,
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, local heads, D] -> the same shape and dtype."""
        x32, weight = as_fp32(x.flatten(-2)), as_fp32(self.weight[self.heads])
        # of each channel, over the group
        num_copies = self.group.size * x32.shape[-1] / self.weight.shape[0]
        squares = reduce_from(x32.square().sum(-1, keepdim=True), self.group)
        mean = copy_to(squares, self.group) / (num_copies * self.weight.shape[0])
        scale = torch.rsqrt(mean + self.eps)
        return (x32 * scale * (weight + 1 if self.is_offset else weight)).to(x.dtype).view_as(x)


def build_head_norm(
    model_config: ModelConfig,
    params: Parameters,
    *,
    heads: slice,
    group: Group,
    is_l2: bool = False,
) -> nn.Module:
    """The norm of queries or keys [B, S, local heads, D]; the identity where none is declared.

    Args:
        model_config: epsilon; one norm per head, or an RMSNorm over all heads.
        params: weight [D], or [all heads * D]; the bias [D] of a LayerNorm.
        heads: channels of this rank, as a range of the weight over all heads.
        group: ranks over which the heads are sharded.
        is_l2: whether it is an RMSNorm without weights per head.
    """
    if is_l2:
        return RMSNorm(None, eps=model_config.norm_epsilon)
    if not model_config.qk_layernorm:
        return nn.Identity()
    if not model_config.qk_layernorm_across_heads:
        return build_norm(model_config, params)
    eps, is_offset = model_config.norm_epsilon, model_config.apply_layernorm_1p
    return WideRMSNorm(params["weight"], eps=eps, heads=heads, group=group, is_offset=is_offset)


def build_norm(model_config: ModelConfig, params: Parameters) -> nn.Module:
    """The norm of a model; the identity where none is declared, but for one without weights.

    Args:
        model_config: kind and epsilon.
        params: weight, and the bias of a LayerNorm.
    """
    eps, is_offset = model_config.norm_epsilon, model_config.apply_layernorm_1p
    if model_config.normalization == "L2Norm":
        return RMSNorm(None, eps=eps)
    if not params:
        return nn.Identity()
    if model_config.normalization == "LayerNorm":
        return LayerNorm(params["weight"], params["bias"], eps=eps, is_offset=is_offset)
    return RMSNorm(params["weight"], eps=eps, is_offset=is_offset)


def build_post_norm(model_config: ModelConfig, params: Parameters, *, half: str) -> nn.Module:
    """The norm of the outputs of a half of a block, "attention" or "mlp"; where none is declared,
    their factor.
    """
    declared, factor = params.submodule(f"{half}_post_norm"), model_config.residual_multiplier
    factor *= model_config.mlp_output_multiplier if half == "mlp" else 1.0
    if declared:
        return build_norm(model_config, declared)
    return build_scale(factor)


def build_scale(factor: float) -> nn.Module:
    """A constant factor; the identity where it is 1."""
    return nn.Identity() if factor == 1.0 else Scale(factor)


class Scale(nn.Module):
    """A constant factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """The same shape and dtype."""
        return x * self.factor
