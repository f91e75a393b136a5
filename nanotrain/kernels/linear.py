"""The three matrix products of a linear layer, y = x W^T + b.

    fprop    y  = x W^T + b                  [..., I], [O, I] -> [..., O]
    dgrad    dx = dy W                       [T, O], [O, I] -> [T, I]
    wgrad    dW = dy^T x                     [T, O], [T, I] -> [O, I]
    Linear   the same for the parameters of one layer, the gradient of the bias included

All dense linear layers, the output layer included, multiply here; another precision is another implementation of these.

    T tokens   I inputs   O outputs
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


def fprop(x: Tensor, weight: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """[..., I], [O, I], [O] -> [..., O]."""
    return F.linear(x, weight, bias)


def dgrad(grad: Tensor, weight: Tensor, *, add_to: Tensor | None = None) -> Tensor:
    """[T, O], [O, I] -> [T, I], added to `add_to` in place where it is given."""
    return grad @ weight if add_to is None else add_to.addmm_(grad, weight)


def wgrad(grad: Tensor, x: Tensor, *, add_to: Tensor | None = None) -> Tensor:
    """[T, O], [T, I] -> [O, I], added to `add_to` in place where it is given, perhaps in a wider dtype."""
    if add_to is None:
        return grad.t() @ x
    if add_to.dtype is grad.dtype:
        return add_to.addmm_(grad.t(), x)
    add_to += grad.t() @ x
    return add_to


@dataclass(frozen=True)
class Linear:
    """The products of one layer."""

    weight: nn.Parameter  # [O, I]
    bias: nn.Parameter | None  # [O], or None

    @property
    def trained_params(self) -> tuple[nn.Parameter, ...]:
        """Weight and bias, where they exist and require a gradient."""
        return tuple(param for param in (self.weight, self.bias) if param is not None and param.requires_grad)

    def fprop(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return fprop(x, self.weight, bias=self.bias)

    def dgrad(self, grad: Tensor, *, add_to: Tensor | None = None) -> Tensor:
        """[T, O] -> [T, I], as `dgrad`."""
        return dgrad(grad, self.weight.detach(), add_to=add_to)

    def wgrad(self, grad: Tensor, x: Tensor) -> list[Tensor]:
        """[T, O], [T, I] -> the gradients of `trained_params`."""
        grads = [wgrad(grad, x)] if self.weight.requires_grad else []
        if self.bias is not None and self.bias.requires_grad:
            grads.append(grad.sum(0))
        return grads
