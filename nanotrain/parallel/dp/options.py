"""`DataParallelOptions`: how one data-parallel wrapper shards, reduces and gathers; read by the plan and by the run."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Self

from torch import nn

from nanotrain.comm.group import Group
from nanotrain.config.config import ParallelConfig, PrecisionConfig
from nanotrain.parallel.dp.strategy import STRATEGIES, Strategy
from nanotrain.precision.policy import Precision

MAX_GRAD_BYTES = 4  # bytes of an fp32 gradient
# Buckets with full-size gradients at once where gradients are sharded: one fills while another is being reduced; a
# third would only hold memory.
MAX_FULL_BUCKETS = 2


@dataclass(frozen=True)
class DataParallelOptions:
    """Options of one wrapper."""

    strategy: Strategy  # what is sharded over the shard group
    overlap_grad_reduce: bool = False  # reduce a bucket as soon as it is ready
    overlap_param_gather: bool = False  # return from `start_param_gather` before the all-gathers are complete
    averages: bool = False  # divide gradients by the number of ranks inside the collective
    grad_scale: float = 1.0  # factor of unreduced gradients
    by_all_to_all: bool = False  # reduce-scatter as an all-to-all and a local fp32 sum
    num_prefetched_units: int = 0  # units gathered ahead where parameters are sharded
    reshards_after_forward: bool = True  # free a unit after its forward and gather it again for its backward
    num_gather_blocks: int = 0  # blocks of memory that gathered units share; 0: allocated with every gather
    keeps_full_grads: bool = False  # all-reduce whole buckets instead of reduce-scatter
    # products write weight gradients into the bucket; None: on GPUs
    writes_wgrads: bool | None = None
    # modules in forward order, and the names of the parameters that each reads; None: the children of the module
    units: Sequence[tuple[nn.Module, Collection[str]]] | None = None
    # whether a forward pass runs again inside a backward
    is_recomputing: Callable[[], bool] = lambda: False
    # weights are gathered in fp8, and these ranks beside those of the buckets share a scale; None: in params_dtype
    fp8_amax_groups: Sequence[Group] | None = None

    @classmethod
    def of(cls, parallel: ParallelConfig, precision: PrecisionConfig) -> Self:
        """The options that the configuration decides; those of a single wrapper keep their defaults.

        >>> options = DataParallelOptions.of(ParallelConfig(overlap_param_gather=True), PrecisionConfig())
        >>> options.num_prefetched_units, options.num_gather_blocks, options.by_all_to_all
        (1, 0, False)
        """
        # fp32 gradients are summed in fp32 by any reduce-scatter
        is_low_precision = Precision.of(precision).grads.itemsize < MAX_GRAD_BYTES
        return cls(
            strategy=STRATEGIES[parallel.data_parallel_sharding_strategy.value],
            overlap_grad_reduce=parallel.overlap_grad_reduce,
            overlap_param_gather=parallel.overlap_param_gather,
            averages=parallel.ddp_average_in_collective,
            by_all_to_all=parallel.reduce_scatter_with_fp32_accumulation and is_low_precision,
            num_prefetched_units=parallel.fsdp_prefetch_depth if parallel.overlap_param_gather else 0,
            reshards_after_forward=parallel.reshard_after_forward,
            num_gather_blocks=1 + parallel.fsdp_prefetch_depth if parallel.fsdp_double_buffer else 0,
            keeps_full_grads=parallel.force_all_reduce,
            writes_wgrads=parallel.gradient_accumulation_fusion,
        )
