"""Settings that would do nothing are errors."""

import pytest

from nanotrain.config.config import Config
from nanotrain.config.rules.unused import reset_unused
from nanotrain.errors import ConfigError, ErrorCollector
from tests.config.asking import config_of, validate

OVERLAP = "parallel.overlap_param_gather"
STRATEGY = "parallel.data_parallel_sharding_strategy"


def reset(config: Config, explicit: frozenset[str]) -> tuple[Config, dict[str, str]]:
    errors = ErrorCollector()
    result = reset_unused(config, explicit=explicit, errors=errors)
    errors.raise_errors()
    return result


def overlapping() -> Config:
    return config_of(overlap_param_gather=True)


def test_a_setting_without_effect_on_the_command_line_is_an_error():
    with pytest.raises(ConfigError) as caught:
        reset(overlapping(), frozenset({OVERLAP, STRATEGY}))
    assert "parallel.overlap_param_gather = true has no effect" in str(caught.value)
    assert "leave --overlap-param-gather out or change --data-parallel-sharding-strategy" in str(
        caught.value
    )


def test_the_cure_of_a_switch_is_the_switch():
    with pytest.raises(ConfigError, match="leave --tensorboard-dir out or set --tensorboard$"):
        reset(config_of(tensorboard_dir="tb"), frozenset({"train.tensorboard_dir"}))
    with pytest.raises(ConfigError, match="leave --no-save-optim out or set --save$"):
        validate(config_of(save=False, save_optim=False))


def test_a_setting_without_effect_in_yaml_alone_is_an_error():
    with pytest.raises(ConfigError, match="has no effect"):
        reset(overlapping(), frozenset())


def test_the_command_line_puts_a_setting_of_a_recipe_out_of_play():
    config_after, origins = reset(overlapping(), frozenset({STRATEGY}))
    assert config_after == Config()
    assert "no_shard gathers no parameters" in origins[OVERLAP]


def test_a_setting_with_effect_stays():
    config = config_of(overlap_param_gather=True, data_parallel_sharding_strategy="optim")
    config_after, origins = reset(config, frozenset())
    assert config_after == config and not origins
    assert config_after.parallel.data_parallel_sharding_strategy == "optim"


def test_settings_of_experts_wait_for_the_config_of_pretrained_weights():
    validate(config_of(moe_aux_loss_coeff=0.01, pretrained_checkpoint="folder"))


def test_rules_on_a_model_that_is_read_later_wait_for_it():
    values = {
        "mtp_loss_scaling_factor": 0.3,
        "moe_router_bias_update_rate": 0.01,
        "use_checkpoint_args": True,
    }
    config, origins = reset(config_of(**values), frozenset())
    assert config.model.mtp.loss_scaling_factor == 0.3
    assert config.model.moe.router_bias_update_rate == 0.01
    assert not origins
