"""The strategies as traits."""

from nanotrain.config.config import ShardingStrategy
from nanotrain.parallel.dp.strategy import STRATEGIES


def test_every_strategy_of_the_configuration_has_traits():
    assert set(STRATEGIES) == {strategy.value for strategy in ShardingStrategy}


def test_each_strategy_shards_what_the_one_before_it_shards_and_more():
    traits = [(s.shard_optim, s.shard_grads, s.shard_params) for s in STRATEGIES.values()]
    assert traits == [(False, False, False), (True, False, False), (True, True, False), (True, True, True)]


def test_only_sharded_params_are_gathered_by_unit():
    assert [name for name, strategy in STRATEGIES.items() if strategy.gathers_by_unit] == ["optim_grads_params"]
