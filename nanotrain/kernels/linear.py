"""The three matrix products of a linear layer, y = x W^T + b.

    fprop    y  = x W^T + b                  [..., I], [O, I] -> [..., O]
    dgrad    dx = dy W                       [T, O], [O, I] -> [T, I]
    wgrad    dW = dy^T x                     [T, O], [T, I] -> [O, I], or written where gradients are accumulated
    Linear   the same for the parameters of one layer, the gradient of the bias included
    Linears  the same for layers that share an input

All dense linear layers, the output layer included, multiply here; `Linears` has another implementation for fp8.

    T tokens   I inputs   O outputs
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.kernels.fp8.layer import Fp8Layer
from nanotrain.kernels.grad_view import GradView, grad_view_of

# A copy of this size stays in the cache, and its memory is used again: measured on one core, adding [8192, 384] from
# bf16 to fp32 took 1.8 to 4.0 ms at once and 1.1 to 1.4 ms in parts of this size.
CAST_ELEMENTS = 2**18


def fprop(x: Tensor, weight: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """[..., I], [O, I], [O] -> [..., O]."""
    return F.linear(x, weight, bias)


def dgrad(grad: Tensor, weight: Tensor, *, add_to: Tensor | None = None) -> Tensor:
    """[T, O], [O, I] -> [T, I], added to `add_to` in place where it is given."""
    return grad @ weight if add_to is None else add_to.addmm_(grad, weight)


def wgrad(grad: Tensor, x: Tensor, *, add_to: Tensor | None = None) -> Tensor:
    """[T, O], [T, I] -> [O, I], added to `add_to` in place where it is given, perhaps in fp32 from 16 bit."""
    if add_to is None:
        return grad.t() @ x
    if add_to.dtype is grad.dtype:
        return add_to.addmm_(grad.t(), x)
    if adds_wider(grad.device.type):
        return torch.addmm(add_to, grad.t(), x, out_dtype=add_to.dtype, out=add_to)
    return _add_cast(add_to, grad.t() @ x)


def _add_cast(total: Tensor, product: Tensor) -> Tensor:
    """Add a 16-bit matrix to an fp32 one in place, some rows at a time on CPUs: torch casts it into a copy before."""
    num_rows = max(1, CAST_ELEMENTS // total.shape[1]) if total.device.type == "cpu" else len(total)
    for part, added in zip(total.split(num_rows), product.split(num_rows), strict=True):
        part += added
    return total


def write_wgrad(grad: Tensor, x: Tensor, *, out: Tensor) -> None:
    """[T, O], [T, I] -> `out` [O, I], perhaps in fp32 from 16 bit."""
    if out.dtype is not grad.dtype and adds_wider(grad.device.type):
        torch.mm(grad.t(), x, out_dtype=out.dtype, out=out)
    elif out.dtype is not grad.dtype:
        out.copy_(wgrad(grad, x))
    else:
        torch.mm(grad.t(), x, out=out)


def accumulate_wgrad(grad: Tensor, x: Tensor, *, view: GradView) -> bool:
    """[T, O], [T, I]: write the product to the view [O, I], or add it there; whether the view can be written now."""
    target = view.start_write()
    if target is None:
        return False
    buffer, has_grads = target
    if has_grads:
        wgrad(grad, x, add_to=buffer)
    else:
        write_wgrad(grad, x, out=buffer)
    return True


def adds_wider(device_type: str) -> bool:
    """Whether a product of 16-bit matrices can be added to an fp32 matrix where it is computed: by cuBLAS only."""
    return device_type == "cuda"


@dataclass(frozen=True)
class Linear:
    """The products of one layer."""

    weight: nn.Parameter  # [O, I]
    bias: nn.Parameter | None  # [O], or None
    fp8: Fp8Layer | None = None  # how the layer uses fp8; None: it does not

    @property
    def trained_params(self) -> tuple[nn.Parameter, ...]:
        """Weight and bias, where they exist and require a gradient."""
        return tuple(param for param in (self.weight, self.bias) if param is not None and param.requires_grad)

    @property
    def writes_wgrad(self) -> bool:
        """Whether the product writes the weight's gradient where it is accumulated."""
        return self.weight.requires_grad and grad_view_of(self.weight) is not None

    @property
    def used_rows(self) -> slice:
        """The rows of the weight that this rank multiplies with."""
        return slice(None)

    @property
    def used_weight(self) -> Tensor:
        """These rows."""
        return self.weight

    @property
    def used_bias(self) -> Tensor | None:
        """The same rows of the bias."""
        return self.bias

    def fprop(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return fprop(x, self.used_weight, bias=self.used_bias)

    def dgrad(self, grad: Tensor, *, add_to: Tensor | None = None) -> Tensor:
        """[T, O] -> [T, I], as `dgrad`."""
        return dgrad(grad, self.used_weight.detach(), add_to=add_to)

    def wgrad(self, grad: Tensor, x: Tensor) -> list[Tensor | None]:
        """[T, O], [T, I] -> the gradients of `trained_params`, None for one that was written."""
        if self._write_wgrad(grad, x) or not self.weight.requires_grad:
            return self.param_grads(grad, None)
        return self.param_grads(grad, wgrad(grad, x))

    def _write_wgrad(self, grad: Tensor, x: Tensor) -> bool:
        """Write the weight's gradient where it is accumulated; whether that was possible."""
        view = grad_view_of(self.weight)
        return view is not None and self.writes_wgrad and accumulate_wgrad(grad, x, view=view)

    def param_grads(self, grad: Tensor, grad_weight: Tensor | None) -> list[Tensor | None]:
        """[T, O], the gradient of the used rows of the weight -> the gradients of `trained_params`."""
        grads = [grad_weight] if self.weight.requires_grad else []
        if self.bias is not None and self.bias.requires_grad:
            grads.append(grad.sum(0))
        return grads


class Linears:
    """The products of layers that share an input, for one microbatch."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        self.linears = linears

    def fprop(self, x: Tensor) -> tuple[Tensor, ...]:
        """[..., I] -> one [..., O] per layer."""
        return tuple(linear.fprop(x) for linear in self.linears)

    def dgrad(self, grads: Sequence[Tensor]) -> Tensor:
        """One [T, O] per layer -> [T, I], their sum."""
        total = self.linears[0].dgrad(grads[0])
        for grad, linear in zip(grads[1:], self.linears[1:], strict=True):
            linear.dgrad(grad, add_to=total)
        return total

    def wgrad(self, grads: Sequence[Tensor], x: Tensor) -> list[Tensor | None]:
        """One [T, O] per layer, [T, I] -> the gradients of the trained parameters, None for one that was written."""
        pairs = zip(grads, self.linears, strict=True)
        return [found for grad, linear in pairs for found in linear.wgrad(grad, x)]
