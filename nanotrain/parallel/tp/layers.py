"""Layers with weights sharded over the tp group (Shoeybi et al. 2019, section 3).

    ColumnParallelLinear      weight [O/tp, I]: each rank computes a shard of the outputs
    RowParallelLinear         weight [O, I/tp]: each rank computes a partial sum of the outputs
    ReplicatedHeadsLinear     weight [O, I] on every rank, which computes some of its rows (fewer heads than ranks)
    VocabParallelEmbedding    weight [Vp/tp, H]: each rank looks up the tokens of its shard
    column_parallel           several column-parallel layers that read one input

            enter                                               leave
    x ------+--- query, key, value (column) --- attention --- output (row) ---+--- y
            +--- gate, up (column) ------------ activation -- down (row) -----+

Layers take their parameters, local shards on any device.

    B batch   S sequence   H hidden   I inputs   O outputs   Vp vocabulary with padding
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.kernels.linear import Linear, dgrad, fprop
from nanotrain.parallel.tp.linears import build_linears
from nanotrain.parallel.tp.tensor_parallel import TensorParallel


class ColumnParallelLinear(nn.Module):
    """A linear layer with sharded outputs.

    Args:
        weight: [O/tp, I].
        bias: [O/tp], or None.
        tensor_parallel: the group that shards the weight.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, *, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.linears = build_linears(tensor_parallel)

    @property
    def linear(self) -> Linear:
        """The matrix products; made at each call, as parameters may be replaced."""
        return Linear(self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S or S/tp, I] -> [B, S, O/tp]."""
        (out,) = column_parallel(x, (self,))
        return out


class ReplicatedHeadsLinear(ColumnParallelLinear):
    """A linear layer with fewer heads than ranks: each rank holds all heads and computes the one that it needs.

    Gradients are zero outside the computed rows and have to be summed over tp.

    Args:
        weight: [O, I].
        bias: [O], or None.
        rows: the outputs to compute.
        tensor_parallel: the group whose ranks share the input.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, *, rows: slice, tensor_parallel: TensorParallel
    ) -> None:
        super().__init__(weight, bias, tensor_parallel=tensor_parallel)
        self.rows = rows

    @property
    def linear(self) -> Linear:
        """The products of the computed rows."""
        return _LinearRows(self.weight, self.bias, self.rows)


def column_parallel(x: Tensor, layers: Sequence[ColumnParallelLinear]) -> tuple[Tensor, ...]:
    """The outputs of column-parallel layers that read one input, which is gathered once.

    Args:
        x: [B, S or S/tp, I].
        layers: of the same tensor-parallel group.

    Returns:
        one [B, S, O/tp] per layer.
    """
    return layers[0].linears.column(x, [layer.linear for layer in layers])


class RowParallelLinear(nn.Module):
    """A linear layer with sharded inputs; partial sums are reduced over the group, then the bias is added.

    Args:
        weight: [O, I/tp].
        bias: [O], replicated, or None.
        tensor_parallel: the group that shards the weight.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, *, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.linears = build_linears(tensor_parallel)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, I/tp] -> [B, S or S/tp, O]."""
        return self.linears.row(x, Linear(self.weight, self.bias))


class VocabParallelEmbedding(nn.Module):
    """A token embedding with a sharded vocabulary.

    Args:
        weight: [Vp/tp, H].
        tensor_parallel: the group that shards the vocabulary.
    """

    def __init__(self, weight: nn.Parameter, *, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        self.weight, self.tensor_parallel = weight, tensor_parallel
        self._look_up = self._look_up_all if tensor_parallel.group.size == 1 else self._look_up_shard

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, S] int64 -> [B, S or S/tp, H]."""
        return self._look_up(tokens)

    def _look_up_all(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)

    def _look_up_shard(self, tokens: Tensor) -> Tensor:
        """Tokens of other shards contribute zero to the reduction."""
        num_local = self.weight.shape[0]
        rows = tokens - self.tensor_parallel.group.index * num_local
        is_masked = (rows < 0) | (rows >= num_local)
        hidden = F.embedding(rows.masked_fill(is_masked, 0), self.weight)
        return self.tensor_parallel.leave(hidden.masked_fill(is_masked[..., None], 0.0))


@dataclass(frozen=True)
class _LinearRows(Linear):
    """The products of some rows of a layer; gradients have the shape of the parameters."""

    rows: slice

    def fprop(self, x: Tensor) -> Tensor:
        return fprop(x, self.weight[self.rows], bias=None if self.bias is None else self.bias[self.rows])

    def dgrad(self, grad: Tensor, *, add_to: Tensor | None = None) -> Tensor:
        return dgrad(grad, self.weight.detach()[self.rows], add_to=add_to)

    def wgrad(self, grad: Tensor, x: Tensor) -> list[Tensor]:
        return [self._pad(g, param) for g, param in zip(super().wgrad(grad, x), self.trained_params, strict=True)]

    def _pad(self, grad: Tensor, param: Tensor) -> Tensor:
        padded = grad.new_zeros(param.shape)
        padded[self.rows] = grad
        return padded
