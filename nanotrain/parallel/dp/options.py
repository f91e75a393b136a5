"""Options of a data-parallel wrapper, read by the plan and by the run.

STRATEGIES             the sharding strategies as traits; no other code compares their names
ReduceGroups           the groups that gradients are summed over
DataParallelOptions    options of one wrapper
layout_rules           rules of the layout of its buffers
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import nn

from nanotrain.comm.group import Group
from nanotrain.config.config import PrecisionConfig
from nanotrain.config.parallel import ParallelConfig
from nanotrain.parallel.dp.layout import LayoutRules
from nanotrain.precision.dtypes import Precision


@dataclass(frozen=True)
class Strategy:
    """The tensors that a `--data-parallel-sharding-strategy` shards."""

    # main params and optimizer state are sharded over the shard group (ZeRO-1; Rajbhandari et al.
    # 2020, section 5.1).
    shard_optim: bool
    # gradients are sharded too and never stored at full size (ZeRO-2; section 5.2)
    shard_grads: bool
    shard_params: bool  # parameters are sharded too and all-gathered per unit (ZeRO-3; section 5.3)


STRATEGIES = {
    "no_shard": Strategy(shard_optim=False, shard_grads=False, shard_params=False),
    "optim": Strategy(shard_optim=True, shard_grads=False, shard_params=False),
    "optim_grads": Strategy(shard_optim=True, shard_grads=True, shard_params=False),
    "optim_grads_params": Strategy(shard_optim=True, shard_grads=True, shard_params=True),
}


# Buckets with full-size gradients at once where gradients are sharded, the next two of the buffer:
# one fills while another is being reduced; a third would only hold memory.
MAX_FULL_BUCKETS = 2


@dataclass(frozen=True)
class ReduceGroups:
    """The two groups a gradient is summed over."""

    shard: Group  # the ranks that a bucket is sharded over
    replicate: Group  # the ranks with the same shard
    shards_across: bool = False  # optimizer state is sharded over `replicate` too

    @cached_property
    def outer(self) -> Group:
        """The ranks that a shard is sharded over: `replicate`, or this rank only."""
        if self.shards_across:
            return self.replicate
        return Group.single_rank(self.replicate.name, self.replicate.rank)


@dataclass(frozen=True)
class DataParallelOptions:
    """Options of one wrapper."""

    strategy: Strategy  # the tensors sharded over the shard group
    overlap_grad_reduce: bool = False  # reduce a bucket as soon as it is ready
    # return from `start_param_gather` before the all-gathers are complete
    overlap_param_gather: bool = False
    averages: bool = False  # divide gradients by the number of ranks inside the collective
    grad_scale: float = 1.0  # factor of unreduced gradients
    by_all_to_all: bool = False  # reduce-scatter as an all-to-all and a local fp32 sum
    num_prefetched_units: int = 0  # units gathered ahead where parameters are sharded
    # free a unit after its forward and gather it again for its backward
    reshards_after_forward: bool = True
    # blocks of memory that gathered units share; 0: allocated with every gather
    num_gather_blocks: int = 0
    keeps_full_grads: bool = False  # all-reduce whole buckets instead of reduce-scatter
    # products write weight gradients into the bucket; None: on GPUs
    writes_wgrads: bool | None = None
    # modules in forward order with the names of the parameters that they read; None: the children
    units: Sequence[tuple[nn.Module, Collection[str]]] | None = None
    # whether a forward pass runs again inside a backward
    is_recomputing: Callable[[], bool] = lambda: False
    # weights are gathered in fp8 and share scales with these further ranks; None: in params_dtype
    fp8_amax_groups: Sequence[Group] | None = None

    @classmethod
    def of(cls, parallel: ParallelConfig, precision: PrecisionConfig) -> Self:
        """The options that follow from the configuration; options per wrapper keep their defaults.

        >>> parallel = ParallelConfig(overlap_param_gather=True)
        >>> options = DataParallelOptions.of(parallel, PrecisionConfig())
        >>> options.num_prefetched_units, options.num_gather_blocks, options.by_all_to_all
        (1, 0, False)
        """
        # fp32 gradients are summed in fp32 by any reduce-scatter
        is_low_precision = Precision.of(precision).grads is not torch.float32
        depth = parallel.fsdp_prefetch_depth
        return cls(
            strategy=STRATEGIES[parallel.data_parallel_sharding_strategy],
            overlap_grad_reduce=parallel.overlap_grad_reduce,
            overlap_param_gather=parallel.overlap_param_gather,
            averages=parallel.ddp_average_in_collective,
            by_all_to_all=parallel.reduce_scatter_with_fp32_accumulation and is_low_precision,
            num_prefetched_units=depth if parallel.overlap_param_gather else 0,
            reshards_after_forward=parallel.reshard_after_forward,
            num_gather_blocks=1 + depth if parallel.fsdp_double_buffer else 0,
            keeps_full_grads=parallel.force_all_reduce,
            writes_wgrads=parallel.gradient_accumulation_fusion,
        )


def layout_rules(
    parallel: ParallelConfig, *, num_shards: int, num_outer_shards: int, is_expert: bool = False
) -> LayoutRules:
    """The rules of a buffer that is sharded over ranks and, in turn, over instances.

    A compiled block runs its hooks after its whole backward and writes to all of its buckets in
    between. Where buckets borrow memory it lies in one, so that it does not wait for reductions of
    its own. Experts are outside of graphs.
    """
    strategy = STRATEGIES[parallel.data_parallel_sharding_strategy]
    return LayoutRules(
        num_shards=num_shards,
        num_outer_shards=num_outer_shards,
        bucket_size=parallel.ddp_bucket_size,
        pad_for_high_busbw=parallel.ddp_pad_buckets_for_high_nccl_busbw,
        gathers_by_unit=strategy.shard_params,
        keeps_units=strategy.shard_grads and parallel.ddp_bucket_size is None and not is_expert,
    )
