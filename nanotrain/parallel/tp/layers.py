"""Tensor and sequence parallelism: layers with weights sharded over the tp group.

    TensorParallel            the group, and the collectives at both ends of a region (region.py)
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

With `--tp-comm-overlap` the forward transfers and the all-gather of dy overlap too, piece by piece
(overlap.py): products.py has both forms.

Layers that read one input (query, key and value; gate and up) share its all-gather and the
reduction of its gradient. Only the local shard of x is saved for the backward and gathered again
there (Korthikanti et al., section 4.2.2). Without sequence parallelism nothing is gathered and dx
is all-reduced.

Layers take their parameters, local shards on any device. Source: Shoeybi et al. 2019, section 3.

    B batch   S sequence   T = B * S   H hidden   I inputs   O local outputs
    Vp vocabulary with padding
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.comm.autograd import eager, eager_or_graph
from nanotrain.kernels.fp8.layer import Fp8Layer, Fp8Options
from nanotrain.kernels.fp8.nvfp4_products import select_linears
from nanotrain.kernels.fp8.products import fp8_in_graph
from nanotrain.kernels.linear import Linear, in_graph
from nanotrain.parallel.tp.overlap_fp8 import can_overlap
from nanotrain.parallel.tp.products import ParallelInGraph, ParallelLinears
from nanotrain.parallel.tp.region import SEQUENCE, TensorParallel

__all__ = [
    "SEQUENCE",
    "ColumnParallelLinear",
    "RowParallelLinear",
    "TensorParallel",
    "VocabParallelEmbedding",
    "column_parallel",
]

# Computes layers that share an input: [B, S or S/tp, I] -> one [B, S, O] per layer.
ComputeLinears = Callable[[Tensor, Sequence[Linear]], tuple[Tensor, ...]]


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
        adds_bias = tensor_parallel.is_plain or tensor_parallel.functions is not None
        super().__init__(weight, bias, fp8=_fp8_layer(tensor_parallel), adds_bias=adds_bias)
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
        first = group.index * weight.shape[0]
        self._embed: Callable[[Tensor, Tensor], Tensor] = F.embedding
        if tensor_parallel.functions is not None:
            self._embed = partial(tensor_parallel.functions.look_up, first=first)
        elif group.size > 1:
            self._embed = partial(_embed_shard, first=first)

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
    if tensor_parallel.functions is not None:
        return tensor_parallel.functions.choose_products(tensor_parallel)
    if tensor_parallel.fp8 is not None:  # operands are cast before they are multiplied
        overlap = ""
        if can_overlap(tensor_parallel.fp8.recipe):
            overlap = tensor_parallel.overlap
        tensor_parallel = replace(tensor_parallel, overlap="", fp8_overlap=overlap)
    compute: Callable[..., tuple[Tensor, ...]] = _compute_overlapped
    if tensor_parallel.is_plain:
        compute = eager_or_graph(_compute_on_one_rank, _compute_in_graph)
    elif tensor_parallel.wgrad_queue is None:
        if tensor_parallel.fp8 is None:
            compute = eager_or_graph(_compute_overlapped, _compute_over_ranks_in_graph)
        elif _fits_in_graph(tensor_parallel, tensor_parallel.fp8):
            compute = eager_or_graph(_compute_overlapped, _compute_fp8_in_graph)
    return partial(compute, tensor_parallel=tensor_parallel)


def _fits_in_graph(tensor_parallel: TensorParallel, fp8: Fp8Options) -> bool:
    """Whether compiled graphs have the fp8 products of layers."""
    has_transfers = tensor_parallel.gathers_input or tensor_parallel.fp8_overlap != ""
    return fp8.fits_in_graph and not has_transfers


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
    trains = (x.requires_grad, *(layer.weight.requires_grad for layer in layers))
    outputs: tuple[Tensor, ...] = ParallelInGraph.apply(
        x, tensor_parallel, writes, trains, *weights, *biases
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
    outputs: tuple[Tensor, ...] = ParallelLinears.apply(x, tensor_parallel, products, *params)
    return outputs
