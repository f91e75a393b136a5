"""Settings of the model that would do nothing are errors."""

import pytest

from nanotrain.config.rules.unused import reset_unused
from nanotrain.config.schema import ENTRIES, value_of
from nanotrain.errors import ConfigError, ErrorCollector
from tests.config.asking import config_of, validate


@pytest.mark.parametrize(
    "values",
    [
        {"num_experts": 4, "moe_shared_expert_gate": True},
        {"position_embedding_type": "learned_absolute", "rotary_base": 5e5},
        {"position_embedding_type": "none", "use_rope_scaling": True},
        {"position_embedding_type": "none", "no_rope_freq": "2"},
        {"multi_latent_attention": True, "no_rope_freq": "2"},
        {"rope_scaling_factor": 2.0},
        {"window_attn_skip_freq": "2"},
        {"position_embedding_type": "none", "rotary_percent": 0.5},
        {"position_embedding_type": "none", "rotary_proportional": True},
        {"num_kv_shared_layers": 1, "use_double_wide_mlp": True, "num_experts": 4},
        {"multi_latent_attention": True, "rotary_percent": 0.5},
        {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0, "use_rope_scaling": True},
        {"add_mlp_bias": True, "add_bias_linear": True},
        {"moe_router_topk": 4},
        {"moe_aux_loss_coeff": 0.1},
        {"num_experts": 4, "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.1},
        {"num_experts": 4, "moe_router_bias_update_rate": 0.1},
        {"kv_lora_rank": 5},
        {"mup_base_hidden_size": 64},
        {"multi_latent_attention": True, "num_query_groups": 2},
    ],
)
def test_no_setting_is_skipped_in_silence(values):
    with pytest.raises(ConfigError, match="has no effect"):
        validate(config_of(**values))


@pytest.mark.parametrize(
    "values",
    [
        {"num_experts": 4, "moe_ffn_hidden_size": 64, "ffn_hidden_size": 64},
        {"num_experts": 4, "moe_router_score_function": "sigmoid", "moe_router_pre_softmax": True},
        {"multi_latent_attention": True, "qk_layernorm": True},
        {"multi_latent_attention": True, "kv_channels": 64},
        {"rotary_scaling_factor": 4.0},
        {"multi_latent_attention": True, "use_rope_scaling": True},
        {"multi_latent_attention": True, "add_qkv_bias": True},
        {"add_bias_linear": True, "add_qkv_bias": True},
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
