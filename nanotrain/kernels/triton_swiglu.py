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
        gate: tl.tensor, up: tl.tensor, out: tl.tensor, numel: tl.tensor, block: tl.constexpr
    ) -> None:
        """silu(gate) * up for one block of elements."""
        offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = offsets < numel
        x = tl.load(gate + offsets, mask=inside).to(tl.float32)
        y = tl.load(up + offsets, mask=inside).to(tl.float32)
        product = x * tl.sigmoid(x) * y
        tl.store(out + offsets, product.to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _swiglu_backward(
        grad: tl.tensor,
        gate: tl.tensor,
        up: tl.tensor,
        grad_gate: tl.tensor,
        grad_up: tl.tensor,
        numel: tl.tensor,
        block: tl.constexpr,
    ) -> None:
        """Gradients of silu(gate) * up for one block of elements."""
        offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = offsets < numel
        g = tl.load(grad + offsets, mask=inside).to(tl.float32)
        x = tl.load(gate + offsets, mask=inside).to(tl.float32)
        y = tl.load(up + offsets, mask=inside).to(tl.float32)
        sigmoid = tl.sigmoid(x)
        slope = 1 + x * (1 - sigmoid)
        gate_grad = g * y * sigmoid * slope
        up_grad = g * x * sigmoid
        tl.store(grad_gate + offsets, gate_grad.to(grad_gate.dtype.element_ty), mask=inside)
        tl.store(grad_up + offsets, up_grad.to(grad_up.dtype.element_ty), mask=inside)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of one shape and dtype."""
    gate = gate.contiguous()
    up = up.contiguous()
    out = torch.empty_like(gate)
    numel = out.numel()
    if numel:
        grid = (triton.cdiv(numel, BLOCK),)
        _swiglu[grid](gate, up, out, numel, block=BLOCK)
    return out


def swiglu_backward(grad: Tensor, *, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up."""
    grad = grad.contiguous()
    gate = gate.contiguous()
    up = up.contiguous()
    grad_gate = torch.empty_like(gate)
    grad_up = torch.empty_like(up)
    numel = grad.numel()
    if numel:
        grid = (triton.cdiv(numel, BLOCK),)
        _swiglu_backward[grid](grad, gate, up, grad_gate, grad_up, numel, block=BLOCK)
    return grad_gate, grad_up
