"""RMSNorm and the fp8 products that read it, without the normalized activations in 16 bits.

    norm_linears   x [..., I] -> x / rms(x) * weight -> one [..., O] per layer
    fuses_norm     whether layers' options allow it

The cast of the input computes the norm as it reads x, rounded as without it, and writes both forms:
the transposed one is kept for wgrad, or cast again where norms are recomputed. Bytes per activation
in bf16 without the factors per row, with scales that need no amax of this tensor:

    norm, cast, and cast for wgrad   (2 + 2) + (2 + 1) + (2 + 1) = 10, of which 2 are kept
    this                             2 + (2 + 1 + 1) = 6, of which 1 is kept
    the same, cast again             2 + (2 + 1) + (2 + 1) = 8, of which none is kept

Scales from the amax of this tensor, or of its rows and columns, read x once more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanotrain.kernels.fp8.layer import Fp8Options
from nanotrain.kernels.fp8.products import Fp8Linears
from nanotrain.kernels.fp8.quantize import NormInput, Quantized
from nanotrain.kernels.linear import Linear
from nanotrain.kernels.rms_norm import rms_factors, rms_gradients


@dataclass(frozen=True)
class NormCast:
    """How the input of layers is normalized in their casts."""

    eps: float
    keeps: bool  # whether the transposed input is kept for wgrad; otherwise it is cast again


def fuses_norm(options: Fp8Options | None) -> bool:
    """Whether kernels cast the input of all products, with scales of this rank."""
    if options is None or not options.is_fused or not options.wgrad:
        return False
    return options.fits_in_graph


def norm_linears(
    x: Tensor, weight: Tensor, *, how: NormCast, linears: Sequence[Linear]
) -> tuple[Tensor, ...]:
    """[..., I], [I] -> one [..., O] per layer, of the normalized x."""
    params = [param for linear in linears for param in linear.trained_params]
    records = torch.is_grad_enabled()
    outputs: tuple[Tensor, ...] = _NormLinears.apply(
        x, weight, how, tuple(linears), records, *params
    )
    return outputs


class _NormLinears(torch.autograd.Function):
    """Keeps x, its factors per row, and the transposed input in fp8."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        how: NormCast,
        linears: Sequence[Linear],
        records: bool,
        *params: Tensor,
    ) -> tuple[Tensor, ...]:
        """The products [..., O]."""
        products = Fp8Linears(linears, records=records)
        factors = rms_factors(x, eps=how.eps)
        is_trained = any(linear.weight.requires_grad for linear in linears)
        keeps = records and how.keeps
        keeps = keeps and is_trained
        normalized = _rows(x, factors, weight=weight)
        outputs, x_t = products.fprop_rows(normalized, keeps=keeps)
        kept = []
        if x_t is not None:
            kept = [x_t.values, x_t.inverse_scales]
            ctx.block = x_t.block
        ctx.linears = linears
        ctx.keys = tuple(products.inverse)
        ctx.save_for_backward(x, weight, factors, *products.inverse.values(), *kept)
        return tuple(out.view(*x.shape[:-1], -1) for out in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, of the weight of the norm, and of the trained parameters."""
        x, weight, factors, *saved = ctx.saved_tensors
        num_scales = len(ctx.keys)
        inverse = dict(zip(ctx.keys, saved[:num_scales], strict=True))
        products = Fp8Linears(ctx.linears, records=True, inverse=inverse)
        flat = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        grad_normalized = products.dgrad(flat)
        grad_normalized = grad_normalized.view(x.shape)
        if len(saved) > num_scales:
            values, scales = saved[num_scales:]
            grad_params = products.wgrad_of(flat, Quantized(values, scales, ctx.block))
        else:
            grad_params = products.wgrad(flat, _rows(x, factors, weight=weight))
        grad_x, grad_weight = rms_gradients(grad_normalized, x=x, weight=weight, factors=factors)
        return grad_x, grad_weight, None, None, None, *grad_params


def _rows(x: Tensor, factors: Tensor, *, weight: Tensor) -> NormInput:
    """The normalized x [T, I], for casts."""
    rows = x.flatten(0, -2)
    row_factors = factors.flatten(0, -2)
    return NormInput(rows, row_factors, weight)
