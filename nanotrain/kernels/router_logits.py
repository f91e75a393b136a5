"""The logits of a router in fp32, and their gradients by tensor cores.

router_logits      x W^T in fp32, of inputs in any dtype
router_gradients   the gradients of x and of W from an fp32 gradient

T tokens   H hidden   E experts
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.kernels.linear import adds_wider


def router_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """[B, S, H], [E, H] -> [B, S, E] fp32."""
    # cuBLAS multiplies 16-bit inputs exactly and sums in fp32
    if hidden.itemsize == 2 and adds_wider(hidden.device.type):
        logits: Tensor = _RouterLogits.apply(hidden.flatten(0, 1), weight)
        return logits.unflatten(0, hidden.shape[:2])
    return F.linear(hidden.float(), weight.float())


class _RouterLogits(torch.autograd.Function):
    """Logits in fp32 of 16-bit inputs, which are kept as they are.

    The gradient of the logits is in fp32, so its products are of `router_gradients`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.to(x.dtype).t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        """The gradients of the inputs and of the router weight."""
        x, weight = ctx.saved_tensors
        needs_wgrad = ctx.needs_input_grad[1]
        grad_x, grad_weight = router_gradients(
            grads[0], x, weight=weight.to(x.dtype), needs_wgrad=needs_wgrad
        )
        return grad_x, None if grad_weight is None else grad_weight.to(weight.dtype)


def router_gradients(
    grad: Tensor, x: Tensor, *, weight: Tensor, needs_wgrad: bool = True
) -> tuple[Tensor, Tensor | None]:
    """The gradients of the inputs [T, H] in their dtype, and of the weight [E, H] in fp32.

    In bf16, tensor cores compute the products: the fp32 gradient is a sum of two bf16 matrices, and
    the other operand is bf16 already. A value is wrong by 2^-17 at most, where TF32
    rounds by 2^-11, and bf16 by 2^-8. fp16 has too few exponents for it.

    Args:
        grad: [T, E] fp32, the gradient of the logits.
        x: [T, H] in 16 bits.
        weight: [E, H] in the dtype of `x`.
        needs_wgrad: whether the weight is trained; None instead of its gradient if not.
    """
    if x.dtype is not torch.bfloat16:
        grad_x = (grad @ weight.float()).to(x.dtype)
        return grad_x, grad.t() @ x.float() if needs_wgrad else None
    parts = split_in_two(grad)
    grad_x = parts @ torch.cat([weight, weight])
    if not needs_wgrad:
        return grad_x, None
    wide = _multiply_wide(parts.t(), x)
    return grad_x, wide.view(2, *weight.shape).sum(0)


def split_in_two(x: Tensor) -> Tensor:
    """[T, E] fp32 -> [T, 2 E] bf16: the rounded values, then their rounding errors.

    >>> split_in_two(torch.tensor([[1.0 + 2**-10]])).tolist()
    [[1.0, 0.0009765625]]
    """
    high = x.bfloat16()
    low = (x - high.float()).bfloat16()
    return torch.cat([high, low], 1)


def _multiply_wide(a: Tensor, b: Tensor) -> Tensor:
    """The fp32 product of matrices in 16 bits."""
    if adds_wider(a.device.type):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
