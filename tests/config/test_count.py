"""Numbers of parameters; the published sizes of whole models stand in test_recipes.py."""

from dataclasses import replace

from nanotrain.config.config import ModelConfig
from nanotrain.config.count import num_active_parameters, num_parameters

SMALL = ModelConfig(num_layers=4, hidden_size=8, num_attention_heads=1, vocab_size=10)
# An expert has three matrices of 8 x 16, the router 6 rows of 8.
EXPERTS = replace(SMALL, num_experts=6, moe_router_topk=2, moe_ffn_hidden_size=16, moe_layer_freq="[0]+[1]*3")
EXPERT, ROUTER, DENSE = 3 * 8 * 16, 6 * 8, 3 * 8 * 64


def test_biases_are_counted_where_they_are():
    """Per block: qkv biases 3 x 8; with add_bias_linear also the output's 8, gate's and up's 64 each, and down's 8."""
    plain = num_parameters(SMALL)
    assert num_parameters(replace(SMALL, add_qkv_bias=True)) - plain == 4 * 24
    assert num_parameters(replace(SMALL, add_bias_linear=True)) - plain == 4 * (24 + 8 + 64 + 64 + 8)


def test_experts_take_the_place_of_the_mlp_where_the_pattern_says_so():
    assert num_parameters(EXPERTS) - num_parameters(SMALL) == 3 * (6 * EXPERT + ROUTER - DENSE)


def test_a_token_meets_its_experts_and_everything_else():
    assert num_parameters(EXPERTS) - num_active_parameters(EXPERTS) == 3 * 4 * EXPERT
    shared = replace(EXPERTS, moe_shared_expert_intermediate_size=32)
    for count in (num_parameters, num_active_parameters):
        assert count(shared) - count(EXPERTS) == 3 * 3 * 8 * 32


def test_latent_attention_has_matrices_down_and_up_and_a_norm_at_each_latent():
    plain = num_parameters(SMALL) - 4 * 4 * 8 * 8
    sizes = {"kv_lora_rank": 5, "qk_head_dim": 4, "qk_pos_emb_head_dim": 2, "v_head_dim": 3, "num_attention_heads": 2}
    latent = replace(SMALL, multi_latent_attention=True, **sizes)
    keys_and_output = 8 * (5 + 2) + 5 + 5 * 2 * (4 + 3) + 2 * 3 * 8
    assert num_parameters(latent) - plain == 4 * (keys_and_output + 8 * 2 * 6)
    with_query_latent = replace(latent, q_lora_rank=7)
    assert num_parameters(with_query_latent) - plain == 4 * (keys_and_output + 8 * 7 + 7 + 7 * 2 * 6)
