"""Parameters without storage, with the shapes of this rank's shards."""

import torch
from torch import nn

from nanotrain.parallel.tp.layers import ColumnParallelLinear, RowParallelLinear
from nanotrain.parallel.tp.tensor_parallel import TensorParallel


def meta_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter on the meta device."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))


def column_linear(
    inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype, tensor_parallel: TensorParallel
) -> ColumnParallelLinear:
    """A column-parallel layer of global size [outputs, inputs] on the meta device."""
    local = shard_size(outputs, tensor_parallel)
    weight = meta_parameter(local, inputs, dtype=dtype)
    return ColumnParallelLinear(
        weight, meta_parameter(local, dtype=dtype) if bias else None, tensor_parallel=tensor_parallel
    )


def row_linear(
    inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype, tensor_parallel: TensorParallel
) -> RowParallelLinear:
    """A row-parallel layer of global size [outputs, inputs] on the meta device."""
    weight = meta_parameter(outputs, shard_size(inputs, tensor_parallel), dtype=dtype)
    return RowParallelLinear(
        weight, meta_parameter(outputs, dtype=dtype) if bias else None, tensor_parallel=tensor_parallel
    )


def shard_size(size: int, tensor_parallel: TensorParallel) -> int:
    """The size of one of the equal shards over tp."""
    num_shards = tensor_parallel.group.size
    assert size % num_shards == 0, f"{size} is not a multiple of tp {num_shards}, which validation refuses"
    return size // num_shards
