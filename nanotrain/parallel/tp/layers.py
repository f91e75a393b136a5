"""Tensor and sequence parallelism: layers with weights sharded over the tp group.

    TensorParallel            the group, and the collectives at both ends of a parallel region
    ColumnParallelLinear      weight [O/tp, I]: each rank computes a shard of the outputs
    RowParallelLinear         weight [O, I/tp]: each rank computes a partial sum of the outputs
    VocabParallelEmbedding    weight [Vp/tp, H]: each rank looks up the tokens of its shard
    column_parallel           several column-parallel layers that read one input

            enter                                               leave
    x ------+--- query, key, value (column) --- attention --- output (row) ---+--- y
            +--- gate, up (column) ------------ activation -- down (row) -----+

    without sequence parallelism            with sequence parallelism (Korthikanti et al. 2022)
    x [B, S, H], replicated                 x [B, S/tp, H], sharded along the sequence
      |  enter: identity                      |  enter: all-gather
    column-parallel, attention or MLP, row-parallel: [B, S, H] partial sums
      |  leave: all-reduce                    |  leave: reduce-scatter
    y [B, S, H], replicated                 y [B, S/tp, H], sharded along the sequence

Backward is the transpose: `enter` sums gradients, `leave` copies or gathers them. Both variants
send the same bytes.

A layer chooses its implementation when it is built. On one rank, without deferred weight gradients
and fp8, it is torch's operator (`_compute_on_one_rank`). Otherwise communication is overlapped with
the products (`_compute_overlapped`); in a graph the backward is one operator that does so
(`_compute_over_ranks_in_graph`), and fp8 products are operators (`_compute_fp8_in_graph`):

    column      enter x                      y_i = x W_i^T + b_i
    backward    start all-gather of x        dx = sum_i dy_i W_i     (dgrad) while x is gathered
                start reduce-scatter of dx   dW_i = dy_i^T x, db_i   (wgrad) while dx is reduced

    row         y = x W^T                    leave y
    backward    start all-gather of dy       dx = dy W of the tokens of this rank, meanwhile
                                             dx of the other tokens, dW = dy^T x

Layers that read one input (query, key and value; gate and up) share its all-gather and the
reduction of its gradient. Only the local shard of x is saved for the backward and gathered again
there (Korthikanti et al., section 4.2.2). Without sequence parallelism nothing is gathered and dx
is all-reduced.

Layers take their parameters, local shards on any device. Source: Shoeybi et al. 2019, section 3.

    B batch   S sequence   T = B * S   H hidden   I inputs   O local outputs
    Vp vocabulary with padding
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.comm.autograd import (
    copy_to,
    eager,
    eager_or_graph,
    gather_along,
    reduce_from,
    scatter_along,
)
from nanotrain.comm.collectives import (
    local_slice,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from nanotrain.comm.group import Group
from nanotrain.comm.work import Work
from nanotrain.kernels.deferred_wgrad import WgradQueue, is_deferring
from nanotrain.kernels.fp8.layer import Fp8Layer, Fp8Options
from nanotrain.kernels.fp8.nvfp4_products import select_linears
from nanotrain.kernels.fp8.products import fp8_in_graph
from nanotrain.kernels.linear import Linear, Linears, LinearsInGraph, declare_effect, in_graph

SEQUENCE = 1  # the dim of [B, S, H] that sequence parallelism shards
# Computes layers that share an input: [B, S or S/tp, I] -> one [B, S, O] per layer.
ComputeLinears = Callable[[Tensor, Sequence[Linear]], tuple[Tensor, ...]]


@dataclass(frozen=True)
class TensorParallel:
    """The group that shards the weights of a layer."""

    group: Group  # the tp group
    # whether activations between tensor-parallel regions are sharded along the sequence
    sequence_parallel: bool = False
    # the queue of deferred weight gradients; None where the schedule has no W actions
    wgrad_queue: WgradQueue | None = None
    fp8: Fp8Options | None = None  # fp8 options of linear layers; None: no fp8
    # whether layers are row-parallel: they reduce their output, others gather their input
    is_row: bool = False

    @classmethod
    def single_rank(cls) -> "TensorParallel":
        """One rank, nothing sharded."""
        return cls(Group.single_rank("tp"))

    @cached_property
    def unsharded(self) -> "TensorParallel":
        """The variant for a replicated weight: no collectives, the same wgrad queue."""
        return replace(self, group=Group.single_rank("tp"), sequence_parallel=False)

    @property
    def is_plain(self) -> bool:
        """Whether layers neither communicate nor defer weight gradients nor use fp8."""
        return self.group.size == 1 and self.wgrad_queue is None and self.fp8 is None

    @property
    def gathers_input(self) -> bool:
        """Whether layers communicate before their products."""
        return self.group.size > 1 and not self.is_row

    def enter(self, x: Tensor) -> Tensor:
        """[B, S or S/tp, H] -> [B, S, H]; each call's backward sums the gradients of all ranks."""
        if self.sequence_parallel:
            return gather_along(x, self.group, dim=SEQUENCE)
        return copy_to(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """[B, S, H], partial sums -> their sum, [B, S or S/tp, H]."""
        if self.sequence_parallel:
            return scatter_along(x, self.group, dim=SEQUENCE)
        return reduce_from(x, self.group)

    def local_slice(self, tensor: Tensor) -> Tensor:
        """[B, S, ...], replicated (positions, masks) -> [B, S or S/tp, ...], this rank's tokens."""
        if self.sequence_parallel:
            return local_slice(tensor, self.group, dim=SEQUENCE)
        return tensor

    def start_enter(self, x: Tensor) -> Work[Tensor]:
        """Start the forward of `enter`, which is the backward of `leave`."""
        if self.sequence_parallel:
            return start_all_gather(x, self.group, dim=SEQUENCE)
        return Work.completed(x)

    def start_leave(self, partial_sum: Tensor) -> Work[Tensor]:
        """Start the forward of `leave`, which is the backward of `enter`.

        A contiguous tensor [B, S, H] is overwritten.
        """
        if self.sequence_parallel:
            return start_reduce_scatter(partial_sum, self.group, dim=SEQUENCE)
        return start_all_reduce(partial_sum, self.group)


class ColumnParallelLinear(Linear):
    """A linear layer with sharded outputs: weight [O, I], bias [O] or None.

    With fewer heads than ranks each rank has all heads and computes the one that it needs: the
    outputs `rows`. Gradients of the other rows are zero, and gradients have to be summed over tp.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        *,
        tensor_parallel: TensorParallel,
        rows: slice | None = None,
    ) -> None:
        super().__init__(weight, bias, fp8=_fp8_layer(tensor_parallel), rows=rows)
        self.compute = _choose_implementation(tensor_parallel)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S or S/tp, I] -> [B, S, O]."""
        (out,) = self.compute(x, (self,))
        return out


def column_parallel(x: Tensor, layers: Sequence[ColumnParallelLinear]) -> tuple[Tensor, ...]:
    """Column-parallel layers of one group that read one input, which is gathered once.

    x [B, S or S/tp, I] -> one [B, S, O] per layer.
    """
    return layers[0].compute(x, layers)


class RowParallelLinear(Linear):
    """A linear layer with sharded inputs: weight [O, I/tp], bias [O] replicated or None.

    Partial sums are reduced over the group, then the bias is added.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, *, tensor_parallel: TensorParallel
    ) -> None:
        super().__init__(
            weight, bias, fp8=_fp8_layer(tensor_parallel), adds_bias=tensor_parallel.is_plain
        )
        self.compute = _choose_implementation(replace(tensor_parallel, is_row=True))

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, I/tp] -> [B, S or S/tp, O]."""
        (out,) = self.compute(x, (self,))
        return out if self.bias is None or self.adds_bias else out + self.bias


class VocabParallelEmbedding(nn.Module):
    """A token embedding with a sharded vocabulary: weight [Vp/tp, H]."""

    def __init__(self, weight: nn.Parameter, *, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        self.weight = weight
        self.tensor_parallel = tensor_parallel
        group = tensor_parallel.group
        self._embed: Callable[[Tensor, Tensor], Tensor] = F.embedding
        if group.size > 1:
            self._embed = partial(_embed_shard, first=group.index * weight.shape[0])

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, S] int64 -> [B, S or S/tp, H]."""
        embedded = self._embed(tokens, self.weight)
        return self.tensor_parallel.leave(embedded)


def _embed_shard(tokens: Tensor, weight: Tensor, *, first: int) -> Tensor:
    """[B, S] -> [B, S, H] by the rows of a shard from token `first` on; zero for other tokens."""
    rows = tokens - first
    is_masked = (rows < 0) | (rows >= len(weight))
    hidden = F.embedding(rows.masked_fill(is_masked, 0), weight)
    return hidden.masked_fill(is_masked[..., None], 0.0)


def _fp8_layer(tensor_parallel: TensorParallel) -> Fp8Layer | None:
    return None if tensor_parallel.fp8 is None else Fp8Layer(tensor_parallel.fp8)


def _choose_implementation(tensor_parallel: TensorParallel) -> ComputeLinears:
    """The implementation of layers, chosen when they are built."""
    compute: Callable[..., tuple[Tensor, ...]] = _compute_overlapped
    if tensor_parallel.is_plain:
        compute = eager_or_graph(_compute_on_one_rank, _compute_in_graph)
    elif tensor_parallel.wgrad_queue is None:
        if tensor_parallel.fp8 is None:
            compute = eager_or_graph(_compute_overlapped, _compute_over_ranks_in_graph)
        elif tensor_parallel.fp8.fits_in_graph and not tensor_parallel.gathers_input:
            compute = eager_or_graph(_compute_overlapped, _compute_fp8_in_graph)
    return partial(compute, tensor_parallel=tensor_parallel)


def _compute_on_one_rank(
    x: Tensor, layers: Sequence[Linear], *, tensor_parallel: TensorParallel
) -> tuple[Tensor, ...]:
    """Plain `F.linear`, unless wgrad is written to gradient buffers."""
    if torch.is_grad_enabled() and any(layer.writes_wgrad for layer in layers):
        return _compute_overlapped(x, layers, tensor_parallel=tensor_parallel)
    return tuple(layer.fprop(x) for layer in layers)


def _compute_in_graph(
    x: Tensor, layers: Sequence[Linear], *, tensor_parallel: TensorParallel
) -> tuple[Tensor, ...]:
    """`F.linear`, or an operator whose backward writes wgrad to the gradient buffer."""
    return tuple(in_graph(x, layer) for layer in layers)


def _compute_fp8_in_graph(
    x: Tensor, layers: Sequence[Linear], *, tensor_parallel: TensorParallel
) -> tuple[Tensor, ...]:
    """fp8 products inside a compiled graph; row-parallel outputs are reduced after them."""
    outputs = fp8_in_graph(x, layers)
    if tensor_parallel.is_row:
        return (tensor_parallel.leave(outputs[0]),)
    return outputs


def _compute_over_ranks_in_graph(
    x: Tensor, layers: Sequence[Linear], *, tensor_parallel: TensorParallel
) -> tuple[Tensor, ...]:
    """Linear layers over tp ranks inside a compiled graph; the backward is one operator."""
    writes = tuple(layer.writes_in_graph and torch.is_grad_enabled() for layer in layers)
    weights = [layer.used_weight for layer in layers]
    biases = [layer.used_bias for layer in layers]
    outputs: tuple[Tensor, ...] = _ParallelInGraph.apply(
        x, tensor_parallel, writes, *weights, *biases
    )
    return outputs


@eager  # scales that ranks share and the wgrad queue stay out of compiled graphs
def _compute_overlapped(
    x: Tensor, layers: Sequence[Linear], *, tensor_parallel: TensorParallel
) -> tuple[Tensor, ...]:
    """Products that overlap with communication; weight gradients may be written or deferred."""
    build_products = select_linears(tensor_parallel.fp8)
    products = build_products(layers, records=torch.is_grad_enabled())  # always off inside apply
    params = [param for layer in layers for param in layer.trained_params]
    outputs: tuple[Tensor, ...] = _ParallelLinears.apply(x, tensor_parallel, products, *params)
    return outputs


class _ParallelLinears(torch.autograd.Function):
    """Linear layers of one input x [B, S, H], whose products overlap with communication."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tensor_parallel: TensorParallel, products: Linears, *params: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.tensor_parallel = tensor_parallel
        ctx.products = products
        # the parameters only for autograd's check that none is overwritten before the backward
        ctx.save_for_backward(x, *params)
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
        gathering = tensor_parallel.start_enter(grads[0])
        if needs_dgrad and tensor_parallel.sequence_parallel and tensor_parallel.fp8 is None:
            grad_x = _dgrad_while_gathered(
                grads[0], gathering, products=products, group=tensor_parallel.group
            )
        grads = (gathering.wait(),)
        # x is not sharded along the sequence, its gradient is no partial sum
        tensor_parallel = tensor_parallel.unsharded
    flat_grads = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
    wgrad = _LinearsWgrad(x, tensor_parallel, products=products, flat_grads=flat_grads)
    queue = tensor_parallel.wgrad_queue
    if not is_deferring(queue):
        wgrad.start()
    reducing = Work[Any].completed(grad_x)
    if needs_dgrad and grad_x is None:
        partial_sum = products.dgrad(flat_grads).view(*grads[0].shape[:-1], x.shape[-1])
        reducing = tensor_parallel.start_leave(partial_sum)
    param_grads: list[Tensor | None] = [None] * len(wgrad.params)
    if is_deferring(queue):
        queue.put(wgrad)
    else:
        param_grads = wgrad.compute()
    return reducing.wait(), param_grads


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


class _ParallelInGraph(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        tensor_parallel: TensorParallel,
        writes: Sequence[bool],
        *params: Tensor,
    ) -> tuple[Tensor, ...]:
        weights = params[: len(writes)]
        biases = params[len(writes) :]
        ctx.tensor_parallel = tensor_parallel
        ctx.writes = writes
        ctx.save_for_backward(x, tensor_parallel.group.handle, *weights)
        if tensor_parallel.is_row:
            partial_sum = F.linear(x, weights[0], biases[0])
            return (tensor_parallel.leave(partial_sum),)
        gathered = tensor_parallel.enter(x)
        return tuple(F.linear(gathered, *pair) for pair in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, weights and biases; None for weight gradients that are written."""
        x, handle, *weights = ctx.saved_tensors
        flags = (ctx.tensor_parallel.sequence_parallel, ctx.tensor_parallel.is_row)
        grad_x, *computed = backward_in_graph(
            [x, handle, *grads], weights, flags=flags, writes=ctx.writes
        )
        param_grads = [None if is_written else computed.pop(0) for is_written in ctx.writes]
        needs_bias_grad = ctx.needs_input_grad[3 + len(weights) :]
        bias_grads: list[Tensor | None] = []
        for grad, is_needed in zip(grads, needs_bias_grad, strict=True):
            bias_grads.append(grad.flatten(0, -2).sum(0) if is_needed else None)
        return grad_x, None, None, *param_grads, *bias_grads


@torch.library.custom_op("nanotrain::parallel_backward", mutates_args=())
def backward_in_graph(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    flags: Sequence[bool],
    writes: Sequence[bool],
) -> list[Tensor]:
    """`_backward` in a compiled graph: the gradients of x and of the weights that are not written.

    Args:
        inputs: x, as it was saved; the handle of the tp group; the gradients of the outputs.
        weights: weights of the products.
        flags: `sequence_parallel` and `is_row` of `TensorParallel`.
        writes: whether the gradient of each weight is written where it is accumulated.
    """
    x, handle, *grads = inputs
    sequence_parallel, is_row = flags
    tensor_parallel = TensorParallel(Group.from_handle(handle), sequence_parallel, is_row=is_row)
    products = LinearsInGraph(weights, writes)
    grad_x, param_grads = _backward(x, grads, tensor_parallel=tensor_parallel, products=products)
    return [grad for grad in (grad_x, *param_grads) if grad is not None]


@backward_in_graph.register_fake
def _(inputs: Any, weights: Any, *, flags: Any, writes: Any) -> list[Tensor]:
    x = inputs[0]
    gradients = [x.new_empty(x.shape)]
    for weight, is_written in zip(weights, writes, strict=True):
        if not is_written:
            gradients.append(weight.new_empty(weight.shape))
    return gradients


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
