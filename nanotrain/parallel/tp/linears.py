"""Linear layers on a tp group, with the communication of their backward overlapped.

    column_linears   layers with sharded outputs that read one input
    row_linear       a layer with sharded inputs

One tp rank without deferred wgrad uses torch's operator, both in compiled graphs (`kernels/traced_wgrad.py` if products
write weight gradients to the gradient buffer) and eagerly if autograd returns the weight gradients. Otherwise:

    forward     enter x                      y_i = x W_i^T + b_i
    backward    start all-gather of x        dx = sum_i dy_i W_i           (dgrad) while x is gathered
                start reduce-scatter of dx   dW_i = dy_i^T x, db_i         (wgrad) while dx is reduced

Layers that read one input (query, key and value; gate and up) share its all-gather and the reduction of its gradient.
Only the local shard of x is saved for the backward and gathered again there (Korthikanti et al. 2022, section 4.2.2).
Without sequence parallelism nothing is gathered and dx is all-reduced.

    [B, S, I] -> [B, S, O]     B batch   S sequence   I inputs   O local outputs   T = B * S
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nanotrain.comm.autograd import eager
from nanotrain.comm.work import Work
from nanotrain.kernels.deferred_wgrad import is_deferring
from nanotrain.kernels.fp8.products import Fp8Linears
from nanotrain.kernels.linear import Linear, Linears
from nanotrain.kernels.traced_wgrad import traced_linear
from nanotrain.parallel.tp.tensor_parallel import TensorParallel


def column_linears(x: Tensor, linears: Sequence[Linear], *, tensor_parallel: TensorParallel) -> tuple[Tensor, ...]:
    """[B, S or S/tp, I] -> one [B, S, O] per layer."""
    if _is_plain(linears, tensor_parallel=tensor_parallel):
        return tuple(_plain(x, linear) for linear in linears)
    return _linears(x, linears, tensor_parallel=tensor_parallel)


def row_linear(x: Tensor, linear: Linear, *, tensor_parallel: TensorParallel) -> Tensor:
    """[B, S, I/tp] -> [B, S or S/tp, O]; the bias is added after the reduction."""
    if _is_plain([linear], tensor_parallel=tensor_parallel):
        return _plain(x, linear)
    (partial,) = _linears(x, [replace(linear, bias=None)], tensor_parallel=tensor_parallel.unsharded)
    out = tensor_parallel.leave(partial)
    return out if linear.bias is None else out + linear.bias


def _is_plain(linears: Sequence[Linear], *, tensor_parallel: TensorParallel) -> bool:
    """Whether torch's operator computes the layers."""
    if tensor_parallel.group.size > 1 or tensor_parallel.wgrad_queue is not None or tensor_parallel.fp8 is not None:
        return False
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return True
    return not any(linear.writes_wgrad for linear in linears)


def _plain(x: Tensor, linear: Linear) -> Tensor:
    """[..., I] -> [..., O] by torch's operator."""
    return traced_linear(x, linear) if torch.compiler.is_compiling() else linear.fprop(x)


def _build_products(linears: Sequence[Linear], *, records: bool) -> Linears:
    """The products of one microbatch; `records`: whether amaxes of fp8 count for the history."""
    return Linears(linears) if linears[0].fp8 is None else Fp8Linears(linears, records=records)


@eager  # collectives and the wgrad queue stay out of compiled graphs
def _linears(x: Tensor, linears: Sequence[Linear], *, tensor_parallel: TensorParallel) -> tuple[Tensor, ...]:
    params = [param for linear in linears for param in (linear.weight, linear.bias)]
    # Inside of the function gradients are always off.
    products = _build_products(linears, records=torch.is_grad_enabled())
    outputs: tuple[Tensor, ...] = _LinearsFunction.apply(x, tensor_parallel, products, *params)
    return outputs


class _LinearsFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tensor_parallel: TensorParallel, products: Linears, *params: Tensor | None
    ) -> tuple[Tensor, ...]:
        entered = tensor_parallel.start_enter(x).wait()
        ctx.tensor_parallel, ctx.products = tensor_parallel, products
        # Parameters are saved for autograd's check that none is overwritten before the backward; read from `products`.
        ctx.save_for_backward(x, *params)
        return products.fprop(entered)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph; the detached tensors below would give wrong second derivatives
            raise RuntimeError(
                "second derivatives of linear layers need one tp rank and --no-gradient-accumulation-fusion"
            )
        # Detached: when deferred, x would keep the graph that it comes from alive.
        x, *params = ctx.saved_tensors
        tensor_parallel, products = ctx.tensor_parallel, ctx.products
        flat_grads = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        wgrad = _LinearsWgrad(x.detach(), tensor_parallel, products=products, flat_grads=flat_grads)
        deferred = is_deferring(tensor_parallel.wgrad_queue)
        if not deferred:
            wgrad.start()
        reducing = None
        if ctx.needs_input_grad[0]:
            shape = (*grads[0].shape[:-1], x.shape[-1])
            reducing = tensor_parallel.start_enter_backward(products.dgrad(flat_grads).view(shape))
        param_grads: list[Tensor | None] = [None] * len(params)
        if deferred:
            tensor_parallel.wgrad_queue.put(wgrad)
        else:
            computed = iter(wgrad.compute())
            param_grads = [next(computed) if p is not None and p.requires_grad else None for p in params]
        grad_x = None if reducing is None else reducing.wait()
        return grad_x, None, None, *param_grads


class _LinearsWgrad:
    """The weight gradients of layers that share an input x [B, S or S/tp, I]; `flat_grads` is one [T, O] per layer."""

    def __init__(
        self, x: Tensor, tensor_parallel: TensorParallel, *, products: Linears, flat_grads: Sequence[Tensor]
    ) -> None:
        self._x, self._tensor_parallel = x, tensor_parallel
        self._products, self._flat_grads = products, flat_grads
        self._gathering: Work[Tensor] | None = None

    @property
    def params(self) -> list[nn.Parameter]:
        """The weights and biases that are trained."""
        return [param for linear in self._products.linears for param in linear.trained_params]

    def start(self) -> None:
        """Start to gather the input."""
        self._gathering = self._tensor_parallel.start_enter(self._x)

    def compute(self) -> list[Tensor | None]:
        """The gradients of `params`, None for one that was written."""
        assert self._gathering is not None, "start comes first, in the same order on every rank"
        x = self._gathering.wait().flatten(0, -2)
        return self._products.wgrad(self._flat_grads, x)
