"""The options of a wrapper follow from the configuration."""

from typing import get_args

import pytest

from nanotrain.config.config import PrecisionConfig
from nanotrain.config.parallel import ParallelConfig, ShardingStrategy
from nanotrain.parallel.dp.options import STRATEGIES, DataParallelOptions


@pytest.mark.parametrize(("overlaps", "depth"), [(False, 0), (True, 3)])
def test_units_are_prefetched_only_if_the_gather_overlaps(overlaps: bool, depth: int) -> None:
    parallel = ParallelConfig(
        overlap_param_gather=overlaps, fsdp_prefetch_depth=3, fsdp_double_buffer=True
    )
    options = DataParallelOptions.of(parallel, PrecisionConfig())
    assert (options.num_prefetched_units, options.num_gather_blocks) == (depth, 4)


@pytest.mark.parametrize("in_bf16", [False, True])
def test_only_gradients_below_fp32_are_reduced_by_all_to_all(in_bf16: bool) -> None:
    parallel = ParallelConfig(reduce_scatter_with_fp32_accumulation=True)
    precision = PrecisionConfig(params_dtype="bf16", grad_reduce_in_bf16=in_bf16)
    assert DataParallelOptions.of(parallel, precision).by_all_to_all is in_bf16


def test_every_strategy_of_the_configuration_has_traits():
    assert set(STRATEGIES) == set(get_args(ShardingStrategy))


def test_each_strategy_shards_what_the_one_before_it_shards_and_more():
    traits = [(s.shard_optim, s.shard_grads, s.shard_params) for s in STRATEGIES.values()]
    assert traits == [
        (False, False, False),
        (True, False, False),
        (True, True, False),
        (True, True, True),
    ]


def test_only_sharded_params_are_gathered_by_unit():
    assert [name for name, strategy in STRATEGIES.items() if strategy.shard_params] == [
        "optim_grads_params"
    ]
