"""SwiGLU, silu(gate) * up (Shazeer 2020), by a Triton kernel or torch's operators; both keep gate and up only.

Autograd would also keep silu(gate). Here the backward computes it again: measured on one core, 2048 x 1024, forward and
backward, bf16 3.4 -> 4.3 ms, fp32 5.1 -> 4.9 ms.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.kernels.choice import uses_triton


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Elementwise, of one shape and dtype."""
    if torch.compiler.is_compiling():  # the compiler keeps no more either
        return F.silu(gate) * up
    out: Tensor = _SwiGLU.apply(gate, up)
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        if uses_triton(gate):
            from nanotrain.kernels import triton_kernels

            return triton_kernels.swiglu_forward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        if uses_triton(gate):
            from nanotrain.kernels import triton_kernels

            grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
            triton_kernels.swiglu_backward(grads[0], gate=gate, up=up, out=(grad_gate, grad_up))
            return grad_gate, grad_up
        grad_silu = grads[0] * up
        grad_gate = torch.ops.aten.silu_backward.grad_input(grad_silu, gate, grad_input=grad_silu)
        return grad_gate, F.silu(gate).mul_(grads[0])
