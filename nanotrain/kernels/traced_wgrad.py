"""Linear layers of compiled graphs whose products write weight gradients to the gradient buffer (`grad_view.py`).

The view, and whether the product writes or adds, change between microbatches, so a graph holds neither. Its backward
calls one operator with the matrices and the weight, and the operator finds the view when it runs:

    nanotrain::write_wgrad(weight [O, I], (grad [T, O], x [T, I]))

A graph returns no gradient of such a weight. The operator is declared to have an effect: a compiler would remove an
operator without outputs, and the gradient would be zero.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanotrain.kernels.grad_view import GradView, grad_view_in_graph, grad_view_of
from nanotrain.kernels.linear import Linear, accumulate_wgrad, dgrad, fprop


@torch.library.custom_op("nanotrain::write_wgrad", mutates_args=())
def write_wgrad(weight: Tensor, operands: Sequence[Tensor]) -> None:
    """Write dW = grad^T x of the two operands to the gradient buffer, or add it after the first microbatch.

    Raises:
        RuntimeError: the backward is not that of a step, so nothing would receive the gradient.
    """
    view = grad_view_in_graph(weight)
    if view is None or not accumulate_wgrad(*operands, view=view.in_graph):
        raise RuntimeError(
            "compiled blocks write weight gradients to the gradient buffer, and this backward is outside of a training"
            " step: use --no-gradient-accumulation-fusion or --no-torch-compile"
        )


@write_wgrad.register_fake
def _(weight: Tensor, operands: Sequence[Tensor]) -> None:
    """The operator has no outputs."""


def _declare_effect() -> bool:
    """Keep the operator in graphs; whether this torch can: 2.10 fails to partition effects of a backward."""
    if torch.__version__ < "2.11":  # compared as versions
        return False
    from torch._library.effects import EffectType

    write_wgrad.register_effect(EffectType.ORDERED)
    return True


CAN_TRACE = _declare_effect()


def writes_in_graph(view: GradView | None) -> bool:
    """Whether a graph that is traced now writes the gradient to this view."""
    return CAN_TRACE and view is not None and view.start_write_in_graph is not None and torch.is_grad_enabled()


def traced_linear(x: Tensor, linear: Linear) -> Tensor:
    """[..., I] -> [..., O], inside of a graph."""
    if not writes_in_graph(grad_view_of(linear.weight) if linear.writes_wgrad else None):
        return linear.fprop(x)
    out: Tensor = _TracedLinear.apply(x, linear.weight, linear.bias)
    return out


class _TracedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return fprop(x, weight, bias=bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        torch.ops.nanotrain.write_wgrad(weight, (grad, x.reshape(-1, x.shape[-1])))
        grad_x = dgrad(grad, weight).view(x.shape) if ctx.needs_input_grad[0] else None
        return grad_x, None, grad.sum(0) if ctx.needs_input_grad[2] else None
