"""Layers with weights sharded over the tp group (Shoeybi et al. 2019, section 3).

    ColumnParallelLinear      weight [O/tp, I]: each rank computes a shard of the outputs
    RowParallelLinear         weight [O, I/tp]: each rank computes a partial sum of the outputs
    ReplicatedHeadsLinear     weight [O, I] on every rank, which computes some of its rows (fewer heads than ranks)
    VocabParallelEmbedding    weight [Vp/tp, H]: each rank looks up the tokens of its shard
    column_parallel           several column-parallel layers that read one input
    ColumnParallelLinears     the same as a module

            enter                                               leave
    x ------+--- query, key, value (column) --- attention --- output (row) ---+--- y
            +--- gate, up (column) ------------ activation -- down (row) -----+

Layers take their parameters, local shards on any device.

    B batch   S sequence   H hidden   I inputs   O outputs   Vp vocabulary with padding
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.kernels.fp8.layer import Fp8Layer
from nanotrain.kernels.linear import Linear
from nanotrain.parallel.tp.linears import column_linears, row_linear
from nanotrain.parallel.tp.tensor_parallel import TensorParallel


class ColumnParallelLinear(nn.Module):
    """A linear layer with sharded outputs: weight [O/tp, I], bias [O/tp] or None."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, *, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        self.weight, self.bias, self.tensor_parallel = weight, bias, tensor_parallel
        self.fp8 = _fp8_layer(tensor_parallel)

    @property
    def linear(self) -> Linear:
        """The matrix products; built at each call, because parameters may be replaced."""
        return Linear(self.weight, self.bias, self.fp8)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S or S/tp, I] -> [B, S, O/tp]."""
        (out,) = column_parallel(x, (self,))
        return out


class ReplicatedHeadsLinear(ColumnParallelLinear):
    """A linear layer with fewer heads than ranks: each rank holds all heads and computes the one that it needs.

    `rows` selects the computed outputs of weight [O, I] and bias [O]. Gradients of the other rows are zero; gradients
    have to be summed over tp.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, *, rows: slice, tensor_parallel: TensorParallel
    ) -> None:
        super().__init__(weight, bias, tensor_parallel=tensor_parallel)
        self.rows = rows

    @property
    def linear(self) -> Linear:
        """The products of the computed rows."""
        return _LinearRows(self.weight, self.bias, self.fp8, rows=self.rows)


def column_parallel(x: Tensor, layers: Sequence[ColumnParallelLinear]) -> tuple[Tensor, ...]:
    """Column-parallel layers of one group that read one input, which is gathered once.

    x [B, S or S/tp, I] -> one [B, S, O/tp] per layer.
    """
    return column_linears(x, [layer.linear for layer in layers], tensor_parallel=layers[0].tensor_parallel)


class ColumnParallelLinears(nn.Module):
    """Column-parallel layers that read one input; it has no parameters of its own.

    Args:
        layers: modules of the parent, which owns their parameters.
    """

    def __init__(self, *layers: ColumnParallelLinear) -> None:
        super().__init__()
        self.layers = layers  # a tuple, so that the parameters are not registered twice

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """[B, S or S/tp, I] -> one [B, S, O/tp] per layer."""
        return column_parallel(x, self.layers)


class RowParallelLinear(nn.Module):
    """A linear layer with sharded inputs: weight [O, I/tp], bias [O] replicated or None.

    Partial sums are reduced over the group, then the bias is added.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, *, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        self.weight, self.bias, self.tensor_parallel = weight, bias, tensor_parallel
        self.fp8 = _fp8_layer(tensor_parallel)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, I/tp] -> [B, S or S/tp, O]."""
        return row_linear(x, Linear(self.weight, self.bias, self.fp8), tensor_parallel=self.tensor_parallel)


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


@dataclass(frozen=True, kw_only=True)
class _LinearRows(Linear):
    """The products of some rows of a layer; gradients have the shape of the parameters."""

    rows: slice

    @property
    def used_rows(self) -> slice:
        return self.rows

    @property
    def used_weight(self) -> Tensor:
        return self.weight[self.rows]

    @property
    def used_bias(self) -> Tensor | None:
        return None if self.bias is None else self.bias[self.rows]

    @property
    def writes_wgrad(self) -> bool:
        return False  # the other rows have to be zero

    def param_grads(self, grad: Tensor, grad_weight: Tensor | None) -> list[Tensor | None]:
        found = zip(super().param_grads(grad, grad_weight), self.trained_params, strict=True)
        return [None if part is None else self._pad(part, param) for part, param in found]

    def _pad(self, grad: Tensor, param: Tensor) -> Tensor:
        padded = grad.new_zeros(param.shape)
        padded[self.rows] = grad
        return padded
