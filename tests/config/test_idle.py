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
        {"model": {"moe_router_topk": 4}},
        {"model": {"moe_aux_loss_coeff": 0.1}},
        {"model": {"num_experts": 4, "moe_ffn_hidden_size": 64, "ffn_hidden_size": 64}},
        {"model": {"num_experts": 4, "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.1}},
        {"model": {"num_experts": 4, "moe_router_bias_update_rate": 0.1}},
        {"model": {"num_experts": 4, "moe_router_score_function": "sigmoid", "moe_router_pre_softmax": True}},
        {"model": {"kv_lora_rank": 5}},
        {"model": {"multi_latent_attention": True, "num_query_groups": 2}},
        {"model": {"multi_latent_attention": True, "qk_layernorm": True}},
        {"parallel": {"sequence_parallel": True}},
        {"parallel": {"cp_comm_type": "a2a"}},
        {"parallel": {"pipeline_schedule": "zb-h1"}},
        {"parallel": {"decoder_first_pipeline_num_layers": 2}},
        {"parallel": {"use_tp_pp_dp_mapping": True}},
        {"checkpoint": {"save": False, "save_interval": 5}},
        {"train": {"eval_interval": 0, "eval_iters": 5}},
        {"train": {"generate_prompt": "def "}},
        {"train": {"profile_step_start": 2}},
        {"train": {"wandb_project": "mine"}},
    ],
)
def test_no_setting_is_skipped_in_silence(values):
    with pytest.raises(ConfigError, match="has no effect"):
        check_idle(config_from_dict(values))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_virtual_stages_ask_for_the_interleaved_schedule(schedule):
    sizes = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}
    with pytest.raises(ConfigError, match="or set --pipeline-schedule interleaved"):
        check_idle(config_from_dict({"parallel": sizes | {"pipeline_schedule": schedule}}))


def test_settings_of_experts_wait_for_the_config_of_pretrained_weights():
    model = {"moe_aux_loss_coeff": 0.01}
    check_idle(config_from_dict({"model": model, "checkpoint": {"pretrained_checkpoint": "folder"}}))
