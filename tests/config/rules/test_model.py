"""Rules of the model section."""

import pytest

from nanotrain.config.rules.check import check_model
from nanotrain.errors import ConfigError
from tests.config.asking import config_of

EXPERTS = {"num_experts": 8}
LATENT = {"multi_latent_attention": True}
SPARSE = LATENT | {"q_lora_rank": 24, "sparse_attention_type": "dsa"}
LINEAR = {"linear_attention_type": "short_conv"}
DELTA = {"linear_attention_type": "gated_delta_net"}
HYBRID = {"num_layers": 4, "hybrid_layer_pattern": "*-*-"}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        LATENT | {"hidden_size": 100, "num_attention_heads": 3, "q_lora_rank": 5},
        LINEAR | {"linear_attention_freq": "2"},
        HYBRID,
        SPARSE,
        LATENT | {"position_embedding_type": "none"},
        HYBRID | {"hybrid_layer_pattern": "M-*-"},
        HYBRID | {"hybrid_layer_pattern": "M-*-/*-/*-", "mtp_num_layers": 2},
        HYBRID | LINEAR | EXPERTS | {"hybrid_layer_pattern": "G-*E"},
    ],
)
def test_what_fits_together_breaks_no_rule(keys):
    check_model(config_of(**keys))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"hidden_size": 100, "num_attention_heads": 3},
            "hidden_size 100 cannot be split into 3 heads",
        ),
        ({"num_query_groups": 3}, "4 query heads cannot share 3 key/value heads"),
        ({"num_query_groups": 8}, "4 query heads cannot share 8 key/value heads"),
        ({"kv_channels": 5}, "a head has 5 channels"),
        (LINEAR | {"linear_attention_freq": "1"}, "no layer has linear_attention_type short_conv"),
        (
            LINEAR | {"linear_attention_freq": "[1,0]"},
            "[1,0]': it takes N for every Nth layer, or a 1 (linear",
        ),
        (DELTA | {"linear_num_key_heads": 5}, "32 value heads cannot share 5 key heads"),
        (DELTA | {"linear_attention_type": "kda"}, "32 value heads beside 16 key heads"),
        (
            {"sparse_attention_type": "dsa"},
            "dsa without multi_latent_attention: its indexer reads the compressed queries",
        ),
        (SPARSE | {"q_lora_rank": None}, "dsa and q_lora_rank is unset"),
        (
            SPARSE | {"dsa_indexer_head_dim": 32},
            "dsa_indexer_head_dim 32 is below qk_pos_emb_head_dim 64",
        ),
        (SPARSE | {"window_size": 8}, "dsa with window_size 8"),
        (HYBRID | {"num_layers": 5}, "hybrid_layer_pattern has 4 of 5 layers"),
        (
            HYBRID | {"hybrid_layer_pattern": "M-*-", "mamba_num_heads": 6, "mamba_num_groups": 4},
            "6 heads of Mamba-2 cannot form 4 groups",
        ),
        (HYBRID | {"hybrid_layer_pattern": "*Z*-"}, "Z is no kind of layer; the letters are"),
        (
            HYBRID | {"hybrid_layer_pattern": "*-*-/*-"},
            "has 1 layer of multi-token prediction: mtp_num_layers is unset",
        ),
        (
            HYBRID | {"hybrid_layer_pattern": "*-*-/*-/*", "mtp_num_layers": 2},
            "the same everywhere; write /*E",
        ),
        (HYBRID | {"hybrid_layer_pattern": "*-*-/*E", "mtp_num_layers": 1}, "that the model has"),
        (
            HYBRID | {"hybrid_layer_pattern": "*-*E"},
            "hybrid_layer_pattern has E and num_experts is unset",
        ),
        (
            HYBRID | {"hybrid_layer_pattern": "*-G-"},
            "hybrid_layer_pattern has G and linear_attention_type is unset",
        ),
        (
            HYBRID | {"hybrid_layer_pattern": "+-+-"},
            "hybrid_layer_pattern has + and multi_latent_attention is off",
        ),
        (HYBRID | LATENT, "hybrid_layer_pattern has * and multi_latent_attention is on"),
        (
            HYBRID | {"mtp_num_layers": 1},
            "has 0 layers of multi-token prediction: mtp_num_layers is 1; end --hybrid",
        ),
        ({"seq_length": 2048}, "seq_length 2048 is longer than max_position_embeddings 1024"),
        ({"rotary_percent": 0.3}, "of which 19 are rotated (rotary_percent 0.3)"),
        (
            {"hidden_size": 72, "rotary_percent": 0.5},
            "a head has 18 channels, of which 9 are rotated",
        ),
        ({"hidden_size": 72, "rotary_percent": 0.5}, "set --kv-channels 20, or another"),
        ({"window_size": 4, "window_attn_skip_freq": "1"}, "no layer has the window of 4 keys"),
        ({"no_rope_freq": "1"}, "no layer has rotary positions"),
        (
            {"window_size": 4, "window_attn_skip_freq": "[1]*3"},
            "a 1 (window) or 0 (none) for each of 4 layers",
        ),
        ({"rotary_percent": 1.5}, "rotary_percent is 1.5"),
        (
            {"position_embedding_type": "yarn"},
            "position_embedding_type is yarn and rotary_scaling_factor is 1.0",
        ),
        (
            {"position_embedding_type": "yarn", "rotary_scaling_factor": 2.0, "beta_fast": 1.0},
            "beta_fast 1.0 is not above beta_slow 1.0",
        ),
        (LATENT | {"qk_pos_emb_head_dim": 63}, "set --qk-pos-emb-head-dim 64"),
        ({"qk_l2_norm": True, "qk_layernorm": True}, "qk_l2_norm with qk_layernorm"),
        ({"qk_l2_norm": True, "qk_clip": True}, "qk_clip with qk_l2_norm"),
        ({"optimizer": "adam_h", "qk_clip": True}, "qk_clip with --optimizer adam_h"),
        (SPARSE | {"attention_chunk_size": 8}, "dsa with attention_chunk_size 8"),
        (
            {"window_size": 4, "attention_chunk_size": 8},
            "window_size 4 with attention_chunk_size 8",
        ),
        (
            {"attention_chunk_size": 8, "window_attn_skip_freq": "1"},
            "no layer attends within chunks of 8 positions",
        ),
    ],
)
def test_a_broken_rule_is_named_with_its_numbers(keys, message):
    with pytest.raises(ConfigError) as caught:
        check_model(config_of(**keys))
    assert message in str(caught.value)
    assert caught.value.fix
