"""Settings of the schedule, of data and of the run that would do nothing are errors."""

import pytest

from nanotrain.config.rules.unused import reset_unused
from nanotrain.config.schema import ENTRIES, value_of
from nanotrain.errors import ConfigError, ErrorCollector
from tests.config.asking import config_of, validate


@pytest.mark.parametrize(
    "values",
    [
        {"lr_wsd_decay_iters": 5},
        {"save": False, "save_optim": False},
        {"lr_warmup_init": 1e-5},
        {"mock_data": True, "generate_tokens": 5},
        {"save": False, "save_interval": 5},
        {"generate_prompt": "def "},
        {"profile_step_start": 2},
        {"wandb_project": "mine"},
        {"wandb_exp_name": "mine"},
        {"lr_decay_iters": 5, "lr_decay_samples": 50},
        {"lr_warmup_iters": 5, "lr_warmup_samples": 5},
        {"lr_warmup_samples": 5, "lr_warmup_fraction": 0.5},
    ],
)
def test_no_setting_is_skipped_in_silence(values):
    with pytest.raises(ConfigError, match="has no effect"):
        validate(config_of(**values))


@pytest.mark.parametrize(
    "values",
    [
        {"mock_data": True, "eod_mask_loss": True},
        {"mock_data": True, "reset_position_ids": True},
        {"lr_decay_style": "constant", "min_lr": 1e-5},
        {"lr_decay_style": "constant", "lr_decay_iters": 50},
        {"lr_decay_style": "constant", "lr_decay_samples": 50},
        {"profile_ranks": [0]},
        {"eval_interval": 0, "eval_iters": 5},
        {"full_validation": True, "eval_iters": 0},
        {"mock_data": True, "vocab_size": 64, "tokenizer_model": "bytes"},
    ],
)
def test_what_megatron_ignores_too_is_reset(values):
    name = list(values)[-1]
    errors = ErrorCollector()
    key = ENTRIES[name].key
    config, origins = reset_unused(config_of(**values), explicit=frozenset({key}), errors=errors)
    errors.raise_errors()
    assert value_of(config, key) == ENTRIES[name].default
    assert "not the command line's" in origins[key]


def test_a_full_validation_validates_without_a_number_of_batches() -> None:
    errors = ErrorCollector()
    values = config_of(full_validation=True, eval_iters=0)
    assert not values.validates
    config, _ = reset_unused(values, explicit=frozenset({"train.eval_iters"}), errors=errors)
    assert config.validates
