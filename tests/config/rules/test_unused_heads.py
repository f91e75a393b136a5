"""Settings of the heads of attention that would do nothing are errors."""

import pytest

from nanotrain.errors import ConfigError
from tests.config.asking import config_of, validate

WINDOWS = {"window_size": 4, "window_attn_skip_freq": "2"}


@pytest.mark.parametrize(
    "values",
    [
        {"window_num_attention_heads": 8},
        {"window_rotary_percent": 0.5},
        WINDOWS | {"position_embedding_type": "none", "window_rotary_percent": 0.5},
        WINDOWS | {"rotary_proportional": True, "window_rotary_percent": 0.5},
        WINDOWS | {"multi_latent_attention": True, "window_num_attention_heads": 8},
        {"attention_output_gate_activation": "softplus"},
        {
            "multi_latent_attention": True,
            "q_lora_rank": 24,
            "sparse_attention_type": "dsa",
            "attention_output_gate": True,
        },
        {"linear_attention_type": "gated_delta_net", "linear_decay_bound": 5.0},
        {"linear_attention_type": "gated_delta_net", "linear_full_rank_gates": True},
    ],
)
def test_no_setting_is_skipped_in_silence(values):
    with pytest.raises(ConfigError, match="has no effect"):
        validate(config_of(**values))
