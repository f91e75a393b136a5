"""Settings of the layout, of update rules and of precision that would do nothing are errors."""

import pytest

from nanotrain.config.rules.unused import reset_unused
from nanotrain.config.schema import ENTRIES, value_of
from nanotrain.errors import ConfigError, ErrorCollector
from tests.config.asking import config_of, validate


@pytest.mark.parametrize(
    "values",
    [
        {"recompute_method": "uniform"},
        {"recompute_granularity": "selective", "recompute_num_layers": 1},
        {"hysteresis": 3},
        {"sgd_momentum": 0.5},
        {"optimizer_offload_fraction": 0.5},
        {"lion_beta1": 0.5},
        {"muon_momentum": 0.5},
        {"muon_tp_mode": "blockwise", "optimizer": "muon"},
        {"optimizer": "sgd", "adam_eps": 1e-5},
        {"optimizer": "muon", "muon_scalar_optimizer": "lion", "adam_beta1": 0.5},
        {"decoupled_min_lr": 1e-5},
        {"exp_avg_dtype": "bf16"},
        {"main_params_dtype": "fp16", "params_dtype": "bf16"},
        {"main_params_dtype": "bf16", "use_precision_aware_optimizer": True},
        {"optimizer": "lion", "use_precision_aware_optimizer": True, "exp_avg_sq_dtype": "bf16"},
        {
            "optimizer": "sgd",
            "sgd_momentum": 0.0,
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": "bf16",
        },
        {"params_dtype": "bf16", "loss_scale_window": 3},
        {"params_dtype": "fp16", "loss_scale": 8.0, "initial_loss_scale": 4.0},
        {"start_weight_decay": 0.1},
        {
            "weight_decay_incr_style": "linear",
            "weight_decay": 0.3,
            "start_weight_decay": 0.1,
            "end_weight_decay": 0.2,
        },
        {"cp_comm_type": "a2a"},
        {"pipeline_schedule": "zb-h1"},
        {"decoder_first_pipeline_num_layers": 2},
        {"account_for_embedding_in_pipeline_split": True},
        {
            "pipeline_model_parallel_size": 2,
            "pipeline_model_parallel_layout": "Ett|ttL",
            "decoder_first_pipeline_num_layers": 2,
        },
    ],
)
def test_no_setting_is_skipped_in_silence(values):
    with pytest.raises(ConfigError, match="has no effect"):
        validate(config_of(**values))


@pytest.mark.parametrize(
    "values",
    [
        {"sequence_parallel": True},
        {"recompute_num_layers": 1},
        {"disable_bf16_reduced_precision_matmul": True},
        {"expert_tensor_parallel_size": 4},
        {"use_tp_pp_dp_mapping": True},
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
