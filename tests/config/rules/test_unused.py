"""Settings that would do nothing are errors."""

import re

import pytest

from nanotrain.config.config import Config
from nanotrain.config.rules.sizes import Values
from nanotrain.config.rules.unused import reset_unused, unused
from nanotrain.config.schema import ENTRIES, value_of
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


def test_rows_name_fields_and_values_that_exist():
    values = Values(Config())
    for rule in unused():
        assert all(name in ENTRIES for name in (*rule.fields, *rule.causes)), rule
        for term in re.split(" and | or ", rule.where):
            name, expected = re.fullmatch(r"(\w+) is (?:not )?(.+)", term).groups()
            kind = type(values[name]) if values[name] is not None else None
            known = (
                {"true", "false"}
                if kind is bool
                else set(ENTRIES[name].choices)
                if name in ENTRIES
                else set()
            )
            assert not known or set(expected.split(", ")) <= known | {"unset"}, rule


def test_reasons_are_plain_text_without_values_to_fill_in():
    assert not [rule.fields for rule in unused() if "{" in rule.why + rule.fix]


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


@pytest.mark.parametrize(
    "values",
    [
        {"lr_wsd_decay_iters": 5},
        {"recompute_method": "uniform"},
        {"recompute_granularity": "selective", "recompute_num_layers": 1},
        {"save": False, "save_optim": False},
        {"lr_decay_style": "constant", "lr_decay_iters": 50},
        {"lr_warmup_init": 1e-5},
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
        {"num_experts": 4, "moe_shared_expert_gate": True},
        {"mock_data": True, "generate_tokens": 5},
        {"position_embedding_type": "learned_absolute", "rotary_base": 5e5},
        {"position_embedding_type": "none", "use_rope_scaling": True},
        {"position_embedding_type": "none", "no_rope_freq": "2"},
        {"multi_latent_attention": True, "no_rope_freq": "2"},
        {"rope_scaling_factor": 2.0},
        {"window_attn_skip_freq": "2"},
        {"position_embedding_type": "none", "rotary_percent": 0.5},
        {"multi_latent_attention": True, "rotary_percent": 0.5},
        {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0, "use_rope_scaling": True},
        {"add_qkv_bias": True, "add_bias_linear": True},
        {"moe_router_topk": 4},
        {"moe_aux_loss_coeff": 0.1},
        {"num_experts": 4, "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.1},
        {"num_experts": 4, "moe_router_bias_update_rate": 0.1},
        {"kv_lora_rank": 5},
        {"multi_latent_attention": True, "num_query_groups": 2},
        {"cp_comm_type": "a2a"},
        {"pipeline_schedule": "zb-h1"},
        {"decoder_first_pipeline_num_layers": 2},
        {"account_for_embedding_in_pipeline_split": True},
        {
            "pipeline_model_parallel_size": 2,
            "pipeline_model_parallel_layout": "Ett|ttL",
            "decoder_first_pipeline_num_layers": 2,
        },
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


def test_settings_of_experts_wait_for_the_config_of_pretrained_weights():
    validate(config_of(moe_aux_loss_coeff=0.01, pretrained_checkpoint="folder"))


@pytest.mark.parametrize(
    "values",
    [
        {"num_experts": 4, "moe_ffn_hidden_size": 64, "ffn_hidden_size": 64},
        {"num_experts": 4, "moe_router_score_function": "sigmoid", "moe_router_pre_softmax": True},
        {"multi_latent_attention": True, "qk_layernorm": True},
        {"multi_latent_attention": True, "kv_channels": 64},
        {"mock_data": True, "eod_mask_loss": True},
        {"mock_data": True, "reset_position_ids": True},
        {"sequence_parallel": True},
        {"rotary_scaling_factor": 4.0},
        {"lr_decay_style": "constant", "min_lr": 1e-5},
        {"recompute_num_layers": 1},
        {"profile_ranks": [0]},
        {"disable_bf16_reduced_precision_matmul": True},
        {"multi_latent_attention": True, "use_rope_scaling": True},
        {"multi_latent_attention": True, "add_qkv_bias": True},
        {"expert_tensor_parallel_size": 4},
        {"use_tp_pp_dp_mapping": True},
        {"eval_interval": 0, "eval_iters": 5},
        {"mock_data": True, "vocab_size": 64, "tokenizer_model": "bytes"},
    ],
)
def test_what_megatron_ignores_too_is_reset(values):
    name = list(values)[-1]
    config, origins = reset(config_of(**values), frozenset({ENTRIES[name].key}))
    assert value_of(config, ENTRIES[name].key) == ENTRIES[name].default
    assert "not the command line's" in origins[ENTRIES[name].key]


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
