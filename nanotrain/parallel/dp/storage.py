"""Allocation of the stores of every bucket of a layout, chosen from the strategy's traits.

build_params   parameter stores, views of the parameter buffer
build_grads    gradient stores, views of a new gradient buffer or borrowers of a pool
"""

import torch
from torch import Tensor

from nanotrain.parallel.dp.layout import BufferLayout
from nanotrain.parallel.dp.reduction import ReduceGroups
from nanotrain.parallel.dp.stores import (
    GradPool,
    GradStore,
    ParamStore,
    ResidentGrads,
    ResidentParams,
    ShardedParams,
    TransientGrads,
    gather_memory,
)
from nanotrain.precision.policy import Precision


def build_params(
    layout: BufferLayout,
    param_buffer: Tensor,
    *,
    groups: ReduceGroups,
    is_sharded: bool,
    update_buffer: Tensor | None = None,
    num_blocks: int = 0,
) -> list[ParamStore]:
    """One parameter store per bucket.

    Args:
        layout: of the buffers.
        param_buffer: [numel], or this rank's shard of it where parameters are sharded.
        groups: of the buckets.
        is_sharded: whether a bucket has full size only while it is gathered.
        update_buffer: what this rank updates, apart from the parameters; None where it is a part of these.
        num_blocks: blocks of memory that gathered units use in turn; 0: allocated with every gather.
    """
    numels = [bucket.update_numel for bucket in layout.buckets]
    updates = [None] * len(numels) if update_buffer is None else update_buffer.split(numels)
    if not is_sharded:
        fulls = param_buffer.split([bucket.numel for bucket in layout.buckets])
        pairs = zip(fulls, updates, strict=True)
        return [ResidentParams(full, groups=groups, update=update) for full, update in pairs]
    shards = param_buffer.split([bucket.shard_numel for bucket in layout.buckets])
    memory = gather_memory(layout, shards, num_blocks=num_blocks)
    return [
        ShardedParams(part, full, groups=groups, update=update)
        for part, full, update in zip(shards, memory, updates, strict=True)
    ]


def build_grads(
    layout: BufferLayout, *, groups: ReduceGroups, precision: Precision, device: torch.device, is_transient: bool
) -> list[GradStore]:
    """One gradient store per bucket.

    Args:
        layout: of the buffers.
        groups: of the buckets.
        precision: dtypes of unreduced gradients and of those that the optimizer reads.
        device: of the storage.
        is_transient: whether a bucket has full size only from the first write to the reduction.
    """
    if not is_transient:
        buffer = torch.zeros(layout.numel, dtype=precision.grads, device=device)
        fulls = buffer.split([bucket.numel for bucket in layout.buckets])
        return [ResidentGrads(full, groups=groups, main_dtype=precision.main_grads) for full in fulls]
    pool = GradPool(max(bucket.numel for bucket in layout.buckets), device=device, dtype=precision.grads)
    shards = torch.zeros(layout.numel // groups.shard.size, dtype=precision.main_grads, device=device)
    return [
        TransientGrads(bucket.numel, part, pool=pool, groups=groups)
        for bucket, part in zip(layout.buckets, shards.split([b.shard_numel for b in layout.buckets]), strict=True)
    ]
