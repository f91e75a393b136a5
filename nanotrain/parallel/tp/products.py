"""Matrix products that share one input, with the communication of their backward hidden behind them.

    forward     enter x                y_i = x W_i^T + b_i
    backward    start to gather x      grad_x = sum_i grad_y_i W_i           while x is on its way
                start to sum grad_x    grad_W_i = grad_y_i^T x, grad_b_i     while grad_x is on its way

Only the rank's own part of x is kept for the backward; without sequence parallelism that is all of it and nothing is
gathered. Query, key and value (or gate and up) read x together, so it is gathered and its gradient summed once.

    [B, S, I] -> [B, S, O]     B batch   S sequence   I inputs   O outputs of this rank   T = B * S
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.comm.work import Work
from nanotrain.parallel.tp.tensor_parallel import TensorParallel
from nanotrain.parallel.tp.weight_grads import Delivery


@dataclass(frozen=True)
class Product:
    """One of the products.

    Args:
        weight: [O, I], or more rows than are used.
        bias: as many as the weight has rows.
        rows: the rows in use; None for all.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None = None
    rows: slice | None = None

    def used(self, parameter: Tensor) -> Tensor:
        """The rows of a parameter that the product reads."""
        return parameter if self.rows is None else parameter[self.rows]

    def whole(self, grad: Tensor, parameter: Tensor) -> Tensor:
        """From the gradient of the rows in use to that of the parameter."""
        if self.rows is None:
            return grad
        out = grad.new_zeros(parameter.shape)
        out[self.rows] = grad
        return out


@torch.compiler.disable  # what waits on other ranks stays out of compiled graphs
def multiply(x: Tensor, products: Sequence[Product], *, tensor_parallel: TensorParallel) -> tuple[Tensor, ...]:
    """Every product of `x`, which enters here.

    Args:
        x: [B, S or S/tp, I].
        products: at least one.
        tensor_parallel: how `x` enters, and where weight gradients are put off.

    Returns:
        a [B, S, O] for each.
    """
    parameters = [parameter for product in products for parameter in (product.weight, product.bias)]
    outputs: tuple[Tensor, ...] = _Multiply.apply(x, tensor_parallel, tuple(products), *parameters)
    return outputs


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tensor_parallel: TensorParallel, products: tuple[Product, ...], *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        entered = tensor_parallel.start_entering(x).wait()
        ctx.tensor_parallel, ctx.products = tensor_parallel, products
        # Saved for the check that nobody overwrites them before the backward; read through the products.
        ctx.save_for_backward(x, *parameters)
        return tuple(F.linear(entered, p.used(p.weight), None if p.bias is None else p.used(p.bias)) for p in products)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Detached: put off, it would keep the graph behind it alive.
        x = ctx.saved_tensors[0].detach()
        tensor_parallel, products = ctx.tensor_parallel, ctx.products
        flat_grads = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        work = _ProductGrads(x, tensor_parallel, products=products, flat_grads=flat_grads)
        queue = tensor_parallel.weight_grads
        is_put_off = queue is not None and queue.is_deferring
        if not is_put_off:
            work.start()
        summing = None
        if ctx.needs_input_grad[0]:
            shape = (*grads[0].shape[:-1], x.shape[-1])
            summing = tensor_parallel.start_summing(_input_grad(flat_grads, products).view(shape))
        grad_of = {}
        if is_put_off:
            queue.put(work)
        else:
            grad_of = {id(delivery.parameter): delivery.grad for delivery in work.finish()}
        parameters = [parameter for product in products for parameter in (product.weight, product.bias)]
        grad_x = None if summing is None else summing.wait()
        return grad_x, None, None, *(grad_of.get(id(parameter)) for parameter in parameters)


def _input_grad(flat_grads: list[Tensor], products: tuple[Product, ...]) -> Tensor:
    """[T, I], this rank's part of the sum."""
    total: Tensor | None = None
    for grad, product in zip(flat_grads, products, strict=True):
        weight = product.used(product.weight.detach())
        total = grad @ weight if total is None else total.addmm_(grad, weight)
    assert total is not None, "products of nothing have no input"
    return total


class _ProductGrads:
    """The weight gradients of products with one input.

    Args:
        x: [B, S or S/tp, I], the rank's own part of the input.
        tensor_parallel: through which it enters.
        products: whose gradients are wanted.
        flat_grads: a [T, O] for each.
    """

    def __init__(
        self, x: Tensor, tensor_parallel: TensorParallel, *, products: tuple[Product, ...], flat_grads: list[Tensor]
    ) -> None:
        self._start: Callable[[], Work[Tensor]] = lambda: tensor_parallel.start_entering(x)
        self._products, self._flat_grads = products, flat_grads
        self._entering: Work[Tensor] | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The weights and biases that are trained."""
        every = [parameter for product in self._products for parameter in (product.weight, product.bias)]
        return [parameter for parameter in every if parameter is not None and parameter.requires_grad]

    def start(self) -> None:
        """Begin to gather the input."""
        self._entering = self._start()

    def finish(self) -> list[Delivery]:
        """Multiply it with the gradients of the outputs."""
        assert self._entering is not None, "start comes first, on every rank at the same place"
        entered = self._entering.wait().flatten(0, -2)
        deliveries = []
        for grad, product in zip(self._flat_grads, self._products, strict=True):
            if product.weight.requires_grad:
                found = product.whole(grad.t() @ entered, product.weight)
                deliveries.append(Delivery(product.weight, found))
            if product.bias is not None and product.bias.requires_grad:
                deliveries.append(Delivery(product.bias, product.whole(grad.sum(0), product.bias)))
        return deliveries
