"""Triton kernels of SwiGLU: one launch forward and one backward, in fp32 from bf16, fp16 and fp32.

    swiglu            silu(gate) * up                                 reads 2 tensors, writes 1
    swiglu_backward   the gradients of gate and up                    reads 3, writes 2

As in triton_softmax.py, parameters are annotated for Triton's compiler, and with TRITON_INTERPRET=1
the kernels run on CPU tensors.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

BLOCK = 2048  # elements that a program handles


if triton is not None:

    @triton.jit
    def _swiglu(
        gate: tl.tensor, up: tl.tensor, out: tl.tensor, number: tl.tensor, block: tl.constexpr
    ) -> None:
        places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = places < number
        x = tl.load(gate + places, mask=inside).to(tl.float32)
        y = tl.load(up + places, mask=inside).to(tl.float32)
        tl.store(out + places, (x * tl.sigmoid(x) * y).to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _swiglu_backward(
        grad: tl.tensor,
        gate: tl.tensor,
        up: tl.tensor,
        grad_gate: tl.tensor,
        grad_up: tl.tensor,
        number: tl.tensor,
        block: tl.constexpr,
    ) -> None:
        places = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = places < number
        g = tl.load(grad + places, mask=inside).to(tl.float32)
        x = tl.load(gate + places, mask=inside).to(tl.float32)
        y = tl.load(up + places, mask=inside).to(tl.float32)
        share = tl.sigmoid(x)
        of_gate = g * y * share * (1 + x * (1 - share))
        tl.store(grad_gate + places, of_gate.to(grad_gate.dtype.element_ty), mask=inside)
        tl.store(grad_up + places, (g * x * share).to(grad_up.dtype.element_ty), mask=inside)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of one shape and dtype."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    if out.numel():
        _swiglu[(triton.cdiv(out.numel(), BLOCK),)](gate, up, out, out.numel(), block=BLOCK)
    return out


def swiglu_backward(grad: Tensor, *, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    if grad.numel():
        grid, outputs = (triton.cdiv(grad.numel(), BLOCK),), (grad_gate, grad_up)
        _swiglu_backward[grid](grad, gate, up, *outputs, grad.numel(), block=BLOCK)
    return grad_gate, grad_up
