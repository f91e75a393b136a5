"""SwiGLU and the fp8 product that reads it, without the activations in 16 bits.

    swiglu_linear   gate, up [..., I] -> silu(gate) * up -> [..., O]
    fuses_swiglu    whether a layer's options allow it

The cast of the input computes silu(gate) * up as it reads both, rounded as without it, and writes
both forms: the transposed one is kept for wgrad. Bytes per activation in bf16 without gate, up and
their gradients, with scales that need no amax of this tensor:

    activation, cast, and cast for wgrad   2 + (2 + 1) + (2 + 1) = 8, of which 2 are kept
    this                                   1 + 1 = 2, of which 1 is kept
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.comm.autograd import eager_or_graph
from nanotrain.kernels.compiler import runs_triton
from nanotrain.kernels.fp8.layer import Fp8Options
from nanotrain.kernels.fp8.products import Fp8Linears
from nanotrain.kernels.fp8.quantize import Quantized, SwigluInput
from nanotrain.kernels.linear import Linear


def fuses_swiglu(options: Fp8Options | None) -> bool:
    """Whether kernels cast both forms of an input in the forward, with scales of this rank.

    A scale that follows from the amax of this tensor would take a second read of gate and up.
    """
    if options is None or not options.is_fused or not options.wgrad:
        return False
    recipe = options.recipe
    reads_once = recipe.has_history or recipe.block[1] is not None
    return reads_once and options.fits_in_graph


def swiglu_linear(gate: Tensor, up: Tensor, *, linear: Linear) -> Tensor:
    """[..., I] twice -> linear(silu(gate) * up), [..., O]."""
    records = torch.is_grad_enabled()
    out: Tensor = _SwigluLinear.apply(gate, up, linear, records, *linear.trained_params)
    return out


class _SwigluLinear(torch.autograd.Function):
    """Keeps gate, up, and the transposed input in fp8."""

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, linear: Linear, records: bool, *params: Tensor
    ) -> Tensor:
        """The product [..., O]."""
        products = Fp8Linears([linear], records=records)
        flat_gate = gate.flatten(0, -2)
        flat_up = up.flatten(0, -2)
        x = SwigluInput(flat_gate.contiguous(), flat_up.contiguous())
        keeps = records and linear.weight.requires_grad
        (out,), x_t = products.fprop_rows(x, keeps=keeps)
        kept = []
        if x_t is not None:
            kept = [x_t.values, x_t.inverse_scales]
            ctx.block = x_t.block
        ctx.linear = linear
        ctx.keys = tuple(products.inverse)
        ctx.save_for_backward(gate, up, *products.inverse.values(), *kept)
        return out.view(*gate.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of gate and up, and of the trained parameters."""
        gate, up, *saved = ctx.saved_tensors
        num_scales = len(ctx.keys)
        inverse = dict(zip(ctx.keys, saved[:num_scales], strict=True))
        products = Fp8Linears([ctx.linear], records=True, inverse=inverse)
        flat = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        grad_x = products.dgrad(flat)
        grad_x = grad_x.view(gate.shape)
        grad_params: Sequence[Tensor | None] = ctx.linear.param_grads(flat[0], None)
        if len(saved) > num_scales:
            values, scales = saved[num_scales:]
            grad_params = products.wgrad_of(flat, Quantized(values, scales, ctx.block))
        grad_gate, grad_up = _swiglu_grads(grad_x, gate=gate, up=up)
        return grad_gate, grad_up, None, None, *grad_params


def _grads_by_kernel(grad: Tensor, *, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, in one launch on GPUs."""
    if not runs_triton(gate):
        return _grads_by_torch(grad, gate=gate, up=up)
    from nanotrain.kernels import triton_swiglu  # imports Triton

    return triton_swiglu.swiglu_backward(grad, gate=gate, up=up)


def _grads_by_torch(grad: Tensor, *, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up."""
    grad_silu = grad * up
    grad_gate = torch.ops.aten.silu_backward(grad_silu, gate)
    grad_up = F.silu(gate) * grad
    return grad_gate, grad_up


_swiglu_grads = eager_or_graph(_grads_by_kernel, _grads_by_torch)
