"""Settings that would do nothing are errors."""

import pytest

from nanotrain.config.config import Config, ShardingStrategy
from nanotrain.config.idle import RULES, check_idle, settle_idle
from nanotrain.config.schema import ENTRIES, config_from_dict
from nanotrain.errors import ConfigError

OVERLAP = "parallel.overlap_param_gather"
STRATEGY = "parallel.data_parallel_sharding_strategy"


def overlapping() -> Config:
    return config_from_dict({"parallel": {"overlap_param_gather": True}})


def test_rules_name_fields_that_exist():
    for rule in RULES:
        assert all(name in ENTRIES for name in (*rule.names, *rule.causes))


def test_a_setting_without_effect_on_the_command_line_is_an_error():
    with pytest.raises(ConfigError) as caught:
        settle_idle(overlapping(), explicit=frozenset({OVERLAP, STRATEGY}))
    assert "parallel.overlap_param_gather = True has no effect" in str(caught.value)
    assert "leave --overlap-param-gather out or change --data-parallel-sharding-strategy" in str(caught.value)


def test_a_setting_without_effect_in_yaml_alone_is_an_error():
    with pytest.raises(ConfigError, match="has no effect"):
        settle_idle(overlapping(), explicit=frozenset())


def test_the_command_line_puts_a_setting_of_a_recipe_out_of_play():
    settled = settle_idle(overlapping(), explicit=frozenset({STRATEGY}))
    assert settled.config == Config()
    assert "no_shard gathers no parameters" in settled.origins[OVERLAP]


def test_a_setting_with_effect_stays():
    values = {"overlap_param_gather": True, "data_parallel_sharding_strategy": "optim"}
    config = config_from_dict({"parallel": values})
    settled = settle_idle(config, explicit=frozenset())
    assert settled.config == config and not settled.origins
    assert settled.config.parallel.data_parallel_sharding_strategy is ShardingStrategy.optim


@pytest.mark.parametrize(
    "values",
    [
        {"optim": {"lr_wsd_decay_iters": 5}},
        {"optim": {"lr_decay_style": "constant", "min_lr": 1e-5}},
        {"optim": {"lr_decay_style": "constant", "lr_decay_iters": 50}},
        {"optim": {"lr_warmup_init": 1e-5}},
        {"precision": {"hysteresis": 3}},
        {"precision": {"params_dtype": "bf16", "loss_scale_window": 3}},
        {"data": {"mock_data": True, "eod_mask_loss": True}},
        {"data": {"mock_data": True, "reset_position_ids": True}},
        {"data": {"mock_data": True}, "train": {"generate_tokens": 5}},
        {"model": {"position_embedding_type": "learned_absolute", "rotary_base": 5e5}},
        {"model": {"position_embedding_type": "none", "use_rope_scaling": True}},
        {"model": {"rope_scaling_factor": 2.0}},
        {"model": {"add_qkv_bias": True, "add_bias_linear": True}},
        {"checkpoint": {"save": False, "save_interval": 5}},
        {"train": {"eval_interval": 0, "eval_iters": 5}},
        {"train": {"profile_step_start": 2}},
        {"train": {"wandb_project": "mine"}},
    ],
)
def test_no_setting_is_skipped_in_silence(values):
    with pytest.raises(ConfigError, match="has no effect"):
        check_idle(config_from_dict(values))
