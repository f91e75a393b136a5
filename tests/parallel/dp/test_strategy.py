"""The strategies as traits."""

from nanotrain.config.config import ShardingStrategy
from nanotrain.parallel.dp.strategy import STRATEGIES


def test_every_strategy_a_user_can_name_has_traits():
    assert set(STRATEGIES) == {strategy.value for strategy in ShardingStrategy}


def test_each_strategy_shards_what_the_one_before_it_shards_and_more():
    traits = [(s.shard_optim, s.shard_grads) for s in STRATEGIES.values()]
    assert traits == [(False, False), (True, False), (True, True)]
