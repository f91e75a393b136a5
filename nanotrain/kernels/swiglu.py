"""SwiGLU, silu(gate) * up (Shazeer 2020): a Triton kernel that keeps gate and up, or torch's operators."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.kernels import triton_kernels
from nanotrain.kernels.choice import uses_triton


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Elementwise, of one shape and dtype."""
    if not uses_triton(gate):
        return F.silu(gate) * up
    out: Tensor = _SwiGLU.apply(gate, up)
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return triton_kernels.swiglu_forward(gate.contiguous(), up.contiguous())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = (saved.contiguous() for saved in ctx.saved_tensors)
        return triton_kernels.swiglu_backward(grads[0].contiguous(), gate=gate, up=up)
