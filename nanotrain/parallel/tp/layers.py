"""Layers whose weights are cut over the tp group.

    ColumnParallelLinear      weight [O/tp, I]: each rank makes its slice of the outputs
    RowParallelLinear         weight [O, I/tp]: each rank makes a part of the sum that every output is
    VocabParallelEmbedding    weight [V/tp, H]: each rank looks up its own rows
    column_parallel           several column-parallel layers that read one input

            enter                                               leave
    x ------+--- query, key, value (column) --- attention --- output (row) ---+--- y
            +--- gate, up (column) ------------ activation -- down (row) -----+

On a tp group of one without deferred weight gradients every layer is torch's own operator; that is settled when the
layer is built. Parameters are made on the meta device.

    B batch   S sequence   H hidden   I inputs   O outputs   V vocabulary with padding
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.parallel.tp.products import Product, multiply
from nanotrain.parallel.tp.tensor_parallel import TensorParallel


class ColumnParallelLinear(nn.Module):
    """A linear layer whose outputs are cut.

    Args:
        inputs: of the layer.
        outputs: of the whole layer, over all ranks.
        bias: whether it has one.
        dtype: of the parameters.
        tensor_parallel: the group that the weight is cut over.
        rows: instead of cutting, hold the whole weight on every rank and compute these rows of it (key and value
            heads that are fewer than ranks). Gradients are zero outside the rows, to be summed over tp.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        tensor_parallel: TensorParallel,
        rows: slice | None = None,
    ) -> None:
        super().__init__()
        self.tensor_parallel, self.rows = tensor_parallel, rows
        held = _part(outputs, tensor_parallel) if rows is None else outputs
        self.weight = _parameter(held, inputs, dtype=dtype)
        self.bias = _parameter(held, dtype=dtype) if bias else None
        is_plain = tensor_parallel.is_plain and rows is None
        self.linear = _torch_linear if is_plain else _inner_linear
        self.together = _apart if is_plain else _together

    @property
    def product(self) -> Product:
        """The matrix product that this layer is."""
        return Product(self.weight, self.bias, self.rows)

    def forward(self, entered: Tensor) -> Tensor:
        """[B, S, I], entered already -> [B, S, O/tp] (or as many as `rows`)."""
        out: Tensor = self.linear(entered, self)
        return out


def column_parallel(x: Tensor, layers: Sequence[ColumnParallelLinear]) -> tuple[Tensor, ...]:
    """The outputs of column-parallel layers for one input, which enters once for all of them.

    Args:
        x: [B, S or S/tp, I], not entered.
        layers: of the same tensor-parallel group.

    Returns:
        a [B, S, O/tp] for each layer.
    """
    outputs: tuple[Tensor, ...] = layers[0].together(x, layers)
    return outputs


class RowParallelLinear(nn.Module):
    """A linear layer whose inputs are cut; its outputs leave as a sum over the group, then the bias is added.

    Args:
        inputs: of the whole layer, over all ranks.
        outputs: of the layer.
        bias: whether it has one; every rank holds all of it.
        dtype: of the parameters.
        tensor_parallel: the group that the weight is cut over.
    """

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype, tensor_parallel: TensorParallel
    ) -> None:
        super().__init__()
        self.tensor_parallel = tensor_parallel
        self.weight = _parameter(outputs, _part(inputs, tensor_parallel), dtype=dtype)
        self.bias = _parameter(outputs, dtype=dtype) if bias else None
        self.linear = _torch_linear if tensor_parallel.is_plain else _summed_linear

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, I/tp] -> [B, S or S/tp, O]."""
        out: Tensor = self.linear(x, self)
        return out


class VocabParallelEmbedding(nn.Module):
    """A table of words cut by rows; what a rank does not hold it adds as zero to the sum.

    Args:
        vocab_size: V, a multiple of the group's size.
        hidden_size: H.
        dtype: of the table.
        tensor_parallel: the group that the table is cut over.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, tensor_parallel: TensorParallel
    ) -> None:
        super().__init__()
        self.tensor_parallel = tensor_parallel
        self.weight = _parameter(_part(vocab_size, tensor_parallel), hidden_size, dtype=dtype)
        self.look_up = _all_words if tensor_parallel.group.size == 1 else _own_words

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, S] int64 -> [B, S or S/tp, H]."""
        words: Tensor = self.look_up(tokens, self)
        return words


def _torch_linear(x: Tensor, layer: ColumnParallelLinear | RowParallelLinear) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)


def _inner_linear(x: Tensor, layer: ColumnParallelLinear) -> Tensor:
    return multiply(x, (layer.product,), tensor_parallel=layer.tensor_parallel.inside)[0]


def _summed_linear(x: Tensor, layer: RowParallelLinear) -> Tensor:
    tensor_parallel = layer.tensor_parallel
    (part,) = multiply(x, (Product(layer.weight),), tensor_parallel=tensor_parallel.inside)
    out = tensor_parallel.leave(part)
    return out if layer.bias is None else out + tensor_parallel.late(layer.bias)


def _apart(x: Tensor, layers: Sequence[ColumnParallelLinear]) -> tuple[Tensor, ...]:
    return tuple(layer(x) for layer in layers)


def _together(x: Tensor, layers: Sequence[ColumnParallelLinear]) -> tuple[Tensor, ...]:
    return multiply(x, [layer.product for layer in layers], tensor_parallel=layers[0].tensor_parallel)


def _all_words(tokens: Tensor, layer: VocabParallelEmbedding) -> Tensor:
    return F.embedding(tokens, layer.tensor_parallel.late(layer.weight))


def _own_words(tokens: Tensor, layer: VocabParallelEmbedding) -> Tensor:
    tensor_parallel, num_rows = layer.tensor_parallel, layer.weight.shape[0]
    rows = tokens - tensor_parallel.group.index * num_rows
    is_elsewhere = (rows < 0) | (rows >= num_rows)
    words = F.embedding(rows.masked_fill(is_elsewhere, 0), tensor_parallel.late(layer.weight))
    return tensor_parallel.leave(words.masked_fill(is_elsewhere[..., None], 0.0))


def _part(size: int, tensor_parallel: TensorParallel) -> int:
    num_parts = tensor_parallel.group.size
    assert size % num_parts == 0, f"{size} cannot be cut into {num_parts} equal parts, which validation rules out"
    return size // num_parts


def _parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
