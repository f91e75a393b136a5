"""Products of sharded linear layers, in eager code and in graphs, that overlap with communication.

ParallelLinears    layers of one input, for autograd
ParallelInGraph    the same inside a compiled graph, with the backward as one operator

T = B * S   B batch   S sequence   I inputs   O local outputs
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.comm.group import Group
from nanotrain.comm.work import Work
from nanotrain.kernels.deferred_wgrad import is_deferring
from nanotrain.kernels.fp8.products import Fp8Linears
from nanotrain.kernels.linear import Linears, LinearsInGraph, declare_effect
from nanotrain.parallel.tp.overlap import gather_products, scatter_product
from nanotrain.parallel.tp.overlap_fp8 import gather_scaled, scatter_scaled
from nanotrain.parallel.tp.region import TensorParallel


class ParallelLinears(torch.autograd.Function):
    """Linear layers of one input x [B, S, H], whose products overlap with communication."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tensor_parallel: TensorParallel, products: Linears, *params: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.tensor_parallel = tensor_parallel
        ctx.products = products
        # the parameters only for autograd's check that none is overwritten before the backward
        ctx.save_for_backward(x, *params)
        if tensor_parallel.overlap:
            outputs = _overlapped_fprop(x, products.weights, tensor_parallel=tensor_parallel)
            return _with_biases(outputs, products.biases)
        if tensor_parallel.fp8_overlap:
            outputs = _overlapped_fp8_fprop(x, products, tensor_parallel=tensor_parallel)
            return _with_biases(outputs, products.biases)
        if tensor_parallel.is_row:
            (partial_sum,) = products.fprop(x)
            return (tensor_parallel.start_leave(partial_sum).wait(),)
        gathering = tensor_parallel.start_enter(x)
        return products.fprop(gathering.wait())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # create_graph; the detached tensors below would give wrong second derivatives
        if torch.is_grad_enabled():
            raise RuntimeError(
                "second derivatives of linear layers need one tp rank and "
                "--no-gradient-accumulation-fusion"
            )
        # Detached: when deferred, x would keep the graph that it comes from alive.
        x = ctx.saved_tensors[0].detach()
        grad_x, param_grads = _backward(
            x,
            grads,
            tensor_parallel=ctx.tensor_parallel,
            products=ctx.products,
            needs_dgrad=ctx.needs_input_grad[0],
        )
        return grad_x, None, None, *param_grads


def _overlapped_fprop(
    x: Tensor, weights: Sequence[Tensor], *, tensor_parallel: TensorParallel
) -> tuple[Tensor, ...]:
    """[B, S or S/tp, I] -> one [B, S/tp or S, O] per weight, in pieces beside their transfers."""
    name = tensor_parallel.overlap
    group = tensor_parallel.group
    matrices = [weight.t() for weight in weights]
    if tensor_parallel.is_row:
        return (scatter_product(name, x, matrix=matrices[0], group=group),)
    return gather_products(name, x, matrices=matrices, group=group).outputs


def _overlapped_fp8_fprop(
    x: Tensor, products: Linears, *, tensor_parallel: TensorParallel
) -> tuple[Tensor, ...]:
    """`_overlapped_fprop` in fp8."""
    assert isinstance(products, Fp8Linears), "only their casts have scales of whole tensors or rows"
    quantized = products.cast_input(x.flatten(0, -2)).get()
    weights = products.cast_weights()
    name = tensor_parallel.fp8_overlap
    batch = len(x)
    group = tensor_parallel.group
    if tensor_parallel.is_row:
        (weight,) = weights
        out = scatter_scaled(
            name, quantized, batch=batch, weight=weight, group=group, dtype=x.dtype
        )
        return (out,)
    return gather_scaled(name, quantized, batch=batch, weights=weights, group=group, dtype=x.dtype)


def _with_biases(outputs: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """New outputs with their biases added."""
    added = []
    for output, bias in zip(outputs, biases, strict=True):
        added.append(output if bias is None else output + bias)
    return tuple(added)


def _backward(
    x: Tensor,
    grads: Sequence[Tensor],
    *,
    tensor_parallel: TensorParallel,
    products: Linears,
    needs_dgrad: bool = True,
) -> tuple[Tensor | None, Sequence[Tensor | None]]:
    """The gradients of x and of the parameters.

    None for a gradient that is not needed, was written where it is accumulated, or is deferred.
    """
    grad_x: Tensor | None = None
    if tensor_parallel.is_row:
        grad_x, gathered = _row_dgrad(
            grads[0], tensor_parallel=tensor_parallel, products=products, needs_dgrad=needs_dgrad
        )
        grads = (gathered,)
        # x is not sharded along the sequence, its gradient is no partial sum
        tensor_parallel = tensor_parallel.unsharded
    flat_grads = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
    wgrad = _LinearsWgrad(x, tensor_parallel, products=products, flat_grads=flat_grads)
    queue = tensor_parallel.wgrad_queue
    if products.has_wgrad and not is_deferring(queue):
        wgrad.start()
    reducing = Work[Any].completed(grad_x)
    if needs_dgrad and tensor_parallel.overlap and is_deferring(queue):
        # no weight gradient follows that would hide the reduction
        grad_x = scatter_product(
            tensor_parallel.overlap,
            torch.cat(list(grads), -1),
            matrix=torch.cat(list(products.weights)),
            group=tensor_parallel.group,
        )
        reducing = Work[Any].completed(grad_x)
    if needs_dgrad and grad_x is None:
        partial_sum = products.dgrad(flat_grads).view(*grads[0].shape[:-1], x.shape[-1])
        reducing = tensor_parallel.start_leave(partial_sum)
    param_grads: list[Tensor | None] = [None] * len(wgrad.params)
    if products.has_wgrad and is_deferring(queue):
        queue.put(wgrad)
    elif products.has_wgrad:
        param_grads = wgrad.compute()
    return reducing.wait(), param_grads


def _row_dgrad(
    grad: Tensor, *, tensor_parallel: TensorParallel, products: Linears, needs_dgrad: bool
) -> tuple[Tensor | None, Tensor]:
    """[B, S/tp, O] -> dgrad [B, S, I] of a row-parallel layer, and the gathered gradient.

    None where dgrad is not needed, or is to be computed from the gathered gradient.
    """
    group = tensor_parallel.group
    if needs_dgrad and tensor_parallel.overlap:
        result = gather_products(
            tensor_parallel.overlap,
            grad,
            matrices=products.weights,
            group=group,
            keeps_input=True,
        )
        assert result.gathered is not None, "the gathered gradient is asked for"
        return result.outputs[0], result.gathered
    gathering = tensor_parallel.start_enter(grad)
    grad_x: Tensor | None = None
    if needs_dgrad and tensor_parallel.sequence_parallel and tensor_parallel.fp8 is None:
        grad_x = _dgrad_while_gathered(grad, gathering, products=products, group=group)
    return grad_x, gathering.wait()


def _dgrad_while_gathered(
    grad: Tensor, gathering: Work[Tensor], *, products: Linears, group: Group
) -> Tensor:
    """[B, S/tp, O] -> [B, S, I]: dgrad of this rank's tokens while other gradients are gathered.

    Not wgrad: in two products it would read and write the gradient of the weight twice.
    """
    (weight,) = products.weights
    batch, length, _ = grad.shape
    weights = weight.expand(batch, -1, -1)
    first = group.index * length
    end = first + length
    out = grad.new_empty((batch, group.size * length, weight.shape[1]))
    torch.bmm(grad, weights, out=out[:, first:end])
    gathered = gathering.wait()
    for others in (slice(0, first), slice(end, None)):
        if gathered[:, others].numel():
            torch.bmm(gathered[:, others], weights, out=out[:, others])
    return out


class ParallelInGraph(torch.autograd.Function):
    """Linear layers over tp ranks inside a compiled graph, with a backward of one operator."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        tensor_parallel: TensorParallel,
        writes: Sequence[bool],
        trains: Sequence[bool],
        *params: Tensor,
    ) -> tuple[Tensor, ...]:
        """The products; `trains` is whether x, and then whether each weight, has a gradient."""
        weights = params[: len(writes)]
        biases = params[len(writes) :]
        ctx.tensor_parallel = tensor_parallel
        ctx.writes = writes
        ctx.trains = trains
        ctx.save_for_backward(x, tensor_parallel.group.handle, *weights)
        if tensor_parallel.overlap:
            outputs = forward_in_graph(
                [x, tensor_parallel.group.handle],
                weights,
                name=tensor_parallel.overlap,
                is_row=tensor_parallel.is_row,
                size=tensor_parallel.group.size,
            )
            return _with_biases(outputs, biases)
        if tensor_parallel.is_row:
            partial_sum = F.linear(x, weights[0], biases[0])
            return (tensor_parallel.leave(partial_sum),)
        gathered = tensor_parallel.enter(x)
        return tuple(F.linear(gathered, *pair) for pair in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, weights and biases; None for weight gradients that are written."""
        x, handle, *weights = ctx.saved_tensors
        needs_dgrad, *trains = ctx.trains
        flags = (ctx.tensor_parallel.sequence_parallel, ctx.tensor_parallel.is_row, needs_dgrad)
        computed = backward_in_graph(
            [x, handle, *grads],
            weights,
            flags=flags,
            trains=trains,
            writes=ctx.writes,
            overlap=ctx.tensor_parallel.overlap,
        )
        gradients = iter(computed)
        grad_x = next(gradients) if needs_dgrad else None
        param_grads: list[Tensor | None] = []
        for is_trained, is_written in zip(trains, ctx.writes, strict=True):
            is_returned = is_trained and not is_written
            param_grads.append(next(gradients) if is_returned else None)
        needs_bias_grad = ctx.needs_input_grad[4 + len(weights) :]
        bias_grads: list[Tensor | None] = []
        for grad, is_needed in zip(grads, needs_bias_grad, strict=True):
            bias_grads.append(grad.flatten(0, -2).sum(0) if is_needed else None)
        return grad_x, None, None, None, *param_grads, *bias_grads


@torch.library.custom_op("nanotrain::parallel_forward", mutates_args=())
def forward_in_graph(
    inputs: Sequence[Tensor], weights: Sequence[Tensor], *, name: str, is_row: bool, size: int
) -> list[Tensor]:
    """Products that overlap with transfers, in a compiled graph.

    Args:
        inputs: x [B, S or S/tp, I]; the handle of the tp group.
        weights: one [O, I] per layer.
        name: `overlap` of `TensorParallel`.
        is_row: whether the layer is row-parallel.
        size: ranks of the group.
    """
    x, handle = inputs
    group = Group.from_handle(handle)
    tensor_parallel = TensorParallel(group, True, is_row=is_row, overlap=name)
    return list(_overlapped_fprop(x, weights, tensor_parallel=tensor_parallel))


@forward_in_graph.register_fake
def _(inputs: Any, weights: Any, *, name: str, is_row: bool, size: int) -> list[Tensor]:
    """The shapes of the products that `forward_in_graph` returns."""
    x = inputs[0]
    batch, length, _ = x.shape
    length = length // size if is_row else length * size
    return [x.new_empty((batch, length, weight.shape[0])) for weight in weights]


@torch.library.custom_op("nanotrain::parallel_backward", mutates_args=())
def backward_in_graph(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    flags: Sequence[bool],
    trains: Sequence[bool],
    writes: Sequence[bool],
    overlap: str,
) -> list[Tensor]:
    """`_backward` in a compiled graph: the needed gradients of x and of the weights.

    A gradient that is written where it is accumulated is left out.

    Args:
        inputs: x, as it was saved; the handle of the tp group; the gradients of the outputs.
        weights: weights of the products.
        flags: `sequence_parallel` and `is_row` of `TensorParallel`; whether x has a gradient.
        trains: whether each weight has a gradient.
        writes: whether the gradient of each weight is written where it is accumulated.
        overlap: `overlap` of `TensorParallel`.
    """
    x, handle, *grads = inputs
    sequence_parallel, is_row, needs_dgrad = flags
    group = Group.from_handle(handle)
    tensor_parallel = TensorParallel(group, sequence_parallel, is_row=is_row, overlap=overlap)
    grad_x, param_grads = _backward(
        x,
        grads,
        tensor_parallel=tensor_parallel,
        products=LinearsInGraph(weights, writes, trains=trains),
        needs_dgrad=needs_dgrad,
    )
    return [grad for grad in (grad_x, *param_grads) if grad is not None]


@backward_in_graph.register_fake
def _(
    inputs: Any, weights: Any, *, flags: Any, trains: Any, writes: Any, overlap: str
) -> list[Tensor]:
    """The shapes of the gradients that `backward_in_graph` returns."""
    x = inputs[0]
    _, _, needs_dgrad = flags
    gradients = [x.new_empty(x.shape)] if needs_dgrad else []
    for weight, is_trained, is_written in zip(weights, trains, writes, strict=True):
        if is_trained and not is_written:
            gradients.append(weight.new_empty(weight.shape))
    return gradients


declare_effect(forward_in_graph)
declare_effect(backward_in_graph)


class _LinearsWgrad:
    """The weight gradients of layers that share an input x [B, S or S/tp, I].

    `flat_grads` is one [T, O] per layer.
    """

    def __init__(
        self,
        x: Tensor,
        tensor_parallel: TensorParallel,
        *,
        products: Linears,
        flat_grads: Sequence[Tensor],
    ) -> None:
        self._x = x
        self._tensor_parallel = tensor_parallel
        self._products = products
        self._flat_grads = flat_grads
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
