"""The strategies as traits."""

from nanotrain.config.config import ShardingStrategy
from nanotrain.parallel.dp.strategy import STRATEGIES, Strategy


def test_every_strategy_of_the_configuration_has_traits():
    assert set(STRATEGIES) == {strategy.value for strategy in ShardingStrategy}


def test_each_strategy_shards_what_the_one_before_it_shards_and_more():
    traits = [(s.shard_optim, s.shard_grads, s.shard_params) for s in STRATEGIES.values()]
    assert traits == [(False, False, False), (True, False, False), (True, True, False)]


def test_only_sharded_params_are_gathered_by_unit():
    assert not any(strategy.gathers_by_unit for strategy in STRATEGIES.values())
    assert Strategy(shard_optim=True, shard_grads=True, shard_params=True).gathers_by_unit
