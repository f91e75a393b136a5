"""Tensor and sequence parallelism: layers with weights sharded over the tp group (Shoeybi et al. 2019, section 3).

    TensorParallel            the group, and the collectives at the entry and exit of a tensor-parallel region
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

Backward is the transpose: `enter` sums gradients, `leave` copies or gathers them. Both variants send the same bytes.

A layer chooses its implementation when it is built. On one rank, without deferred weight gradients and fp8, it is
torch's operator (`_on_one_rank`), in fp8 and compiled a part of the graph (`_in_fp8`). Otherwise communication is
overlapped with the products (`_parallel`):

    forward     enter x                      y_i = x W_i^T + b_i
    backward    start all-gather of x        dx = sum_i dy_i W_i           (dgrad) while x is gathered
                start reduce-scatter of dx   dW_i = dy_i^T x, db_i         (wgrad) while dx is reduced

Layers that read one input (query, key and value; gate and up) share its all-gather and the reduction of its gradient.
Only the local shard of x is saved for the backward and gathered again there (Korthikanti et al., section 4.2.2).
Without sequence parallelism nothing is gathered and dx is all-reduced.

Layers take their parameters, local shards on any device.

    B batch   S sequence   H hidden   I inputs   O local outputs   T = B * S   Vp vocabulary with padding
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.comm.autograd import copy_to, eager, gather_along, reduce_from, scatter_along
from nanotrain.comm.collectives import local_slice, start_all_gather, start_all_reduce, start_reduce_scatter
from nanotrain.comm.group import Group
from nanotrain.comm.work import Work
from nanotrain.kernels.deferred_wgrad import WgradQueue, is_deferring
from nanotrain.kernels.fp8.layer import Fp8Layer, Fp8Options
from nanotrain.kernels.fp8.products import Fp8Linears, fp8_in_graph
from nanotrain.kernels.linear import Linear, Linears, in_graph

SEQUENCE = 1  # the dim of [B, S, H] that sequence parallelism shards
# Computes layers that share an input: [B, S or S/tp, I] -> one [B, S, O] per layer.
ComputeLinears = Callable[[Tensor, Sequence[Linear]], tuple[Tensor, ...]]


@dataclass(frozen=True)
class TensorParallel:
    """The group that shards the weights of a layer."""

    group: Group  # the tp group
    sequence_parallel: bool = False  # activations between tensor-parallel regions are sharded along the sequence
    # where linear layers defer their weight gradients; None where the schedule has no W actions
    wgrad_queue: WgradQueue | None = None
    fp8: Fp8Options | None = None  # how linear layers use fp8; None: they do not

    @classmethod
    def single_rank(cls) -> "TensorParallel":
        """One rank, nothing sharded."""
        return cls(Group.single_rank("tp"))

    @cached_property
    def unsharded(self) -> "TensorParallel":
        """For a layer whose weight is not sharded: no collectives, the same wgrad queue."""
        return replace(self, group=Group.single_rank("tp"), sequence_parallel=False)

    @property
    def is_plain(self) -> bool:
        """Whether layers neither communicate nor defer weight gradients nor use fp8."""
        return self.group.size == 1 and self.wgrad_queue is None and self.fp8 is None

    def enter(self, x: Tensor) -> Tensor:
        """[B, S or S/tp, H] -> [B, S, H]; backward sums the gradients of all ranks, once per call."""
        return gather_along(x, self.group, dim=SEQUENCE) if self.sequence_parallel else copy_to(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """[B, S, H], partial sums -> their sum, [B, S or S/tp, H]."""
        return scatter_along(x, self.group, dim=SEQUENCE) if self.sequence_parallel else reduce_from(x, self.group)

    def local_slice(self, tensor: Tensor) -> Tensor:
        """[B, S, ...], replicated (positions, masks) -> [B, S or S/tp, ...], the tokens of this rank."""
        return local_slice(tensor, self.group, dim=SEQUENCE) if self.sequence_parallel else tensor

    def start_enter(self, x: Tensor) -> Work[Tensor]:
        """Start the forward of `enter`, without autograd."""
        return start_all_gather(x, self.group, dim=SEQUENCE) if self.sequence_parallel else Work.completed(x)

    def start_enter_backward(self, grad: Tensor) -> Work[Tensor]:
        """Start the backward of `enter`; a contiguous `grad` [B, S, H] is overwritten."""
        if self.sequence_parallel:
            return start_reduce_scatter(grad, self.group, dim=SEQUENCE)
        return start_all_reduce(grad, self.group)


class ColumnParallelLinear(Linear):
    """A linear layer with sharded outputs: weight [O, I], bias [O] or None.

    With fewer heads than ranks each rank holds all heads and computes the one that it needs: `rows` are those outputs.
    Gradients of the other rows are zero, and gradients have to be summed over tp.
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
        self.compute = _choose(tensor_parallel, is_plain=tensor_parallel.is_plain)

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

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, *, tensor_parallel: TensorParallel) -> None:
        is_plain = tensor_parallel.is_plain
        super().__init__(weight, bias, fp8=_fp8_layer(tensor_parallel), adds_bias=is_plain)
        self.tensor_parallel, self.compute = tensor_parallel, _choose(tensor_parallel.unsharded, is_plain=is_plain)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, I/tp] -> [B, S or S/tp, O]."""
        (partial_sum,) = self.compute(x, (self,))
        out = self.tensor_parallel.leave(partial_sum)
        return out if self.bias is None or self.adds_bias else out + self.bias


class VocabParallelEmbedding(nn.Module):
    """A token embedding with a sharded vocabulary: weight [Vp/tp, H]."""

    def __init__(self, weight: nn.Parameter, *, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        self.weight, self.tensor_parallel, group = weight, tensor_parallel, tensor_parallel.group
        first = group.index * weight.shape[0]
        self._embed = F.embedding if group.size == 1 else partial(_embed_shard, first=first)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, S] int64 -> [B, S or S/tp, H]."""
        return self.tensor_parallel.leave(self._embed(tokens, self.weight))


def _embed_shard(tokens: Tensor, weight: Tensor, *, first: int) -> Tensor:
    """[B, S] -> [B, S, H] by the rows of a vocabulary from `first` on; zero for tokens of other shards."""
    rows = tokens - first
    is_masked = (rows < 0) | (rows >= len(weight))
    hidden = F.embedding(rows.masked_fill(is_masked, 0), weight)
    return hidden.masked_fill(is_masked[..., None], 0.0)


def _fp8_layer(tensor_parallel: TensorParallel) -> Fp8Layer | None:
    return None if tensor_parallel.fp8 is None else Fp8Layer(tensor_parallel.fp8)


def _choose(tensor_parallel: TensorParallel, *, is_plain: bool) -> ComputeLinears:
    """The implementation of layers, chosen when they are built."""
    fp8, is_local = tensor_parallel.fp8, tensor_parallel.group.size == 1 and tensor_parallel.wgrad_queue is None
    in_fp8 = _in_fp8 if fp8 is not None and fp8.reduce_amax is None and is_local else _parallel
    return partial(_on_one_rank if is_plain else in_fp8, tensor_parallel=tensor_parallel)


def _on_one_rank(x: Tensor, layers: Sequence[Linear], *, tensor_parallel: TensorParallel) -> tuple[Tensor, ...]:
    """Torch's operator, unless weight gradients are written where they are accumulated."""
    if torch.compiler.is_compiling():
        return tuple(in_graph(x, layer) for layer in layers)
    if torch.is_grad_enabled() and any(layer.writes_wgrad for layer in layers):
        return _parallel(x, layers, tensor_parallel=tensor_parallel)
    return tuple(layer.fprop(x) for layer in layers)


def _in_fp8(x: Tensor, layers: Sequence[Linear], *, tensor_parallel: TensorParallel) -> tuple[Tensor, ...]:
    """Without communication."""
    if torch.compiler.is_compiling():
        return fp8_in_graph(x, layers)
    return _parallel(x, layers, tensor_parallel=tensor_parallel)


@eager  # collectives and the wgrad queue stay out of compiled graphs
def _parallel(x: Tensor, layers: Sequence[Linear], *, tensor_parallel: TensorParallel) -> tuple[Tensor, ...]:
    products = Linears if tensor_parallel.fp8 is None else Fp8Linears
    params = [param for layer in layers for param in layer.trained_params]
    # Inside of the function gradients are always off.
    of_microbatch = products(layers, records=torch.is_grad_enabled())
    outputs: tuple[Tensor, ...] = _ParallelLinears.apply(x, tensor_parallel, of_microbatch, *params)
    return outputs


class _ParallelLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tensor_parallel: TensorParallel, products: Linears, *params: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.tensor_parallel, ctx.products = tensor_parallel, products
        # Parameters are saved for autograd's check that none is overwritten before the backward; read from `products`.
        ctx.save_for_backward(x, *params)
        return products.fprop(tensor_parallel.start_enter(x).wait())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph; the detached tensors below would give wrong second derivatives
            raise RuntimeError(
                "second derivatives of linear layers need one tp rank and --no-gradient-accumulation-fusion"
            )
        # Detached: when deferred, x would keep the graph that it comes from alive.
        x, *params = ctx.saved_tensors
        tensor_parallel: TensorParallel = ctx.tensor_parallel
        products: Linears = ctx.products
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
        if is_deferring(tensor_parallel.wgrad_queue):
            tensor_parallel.wgrad_queue.put(wgrad)
        else:
            param_grads = wgrad.compute()
        return (None if reducing is None else reducing.wait()), None, None, *param_grads


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
