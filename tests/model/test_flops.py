"""The count of operations, against numbers known from elsewhere."""

from dataclasses import replace

from nanotrain.config.config import ModelConfig
from nanotrain.model.flops import flops_per_token
from tests.model.building import GPT2, LLAMA

LLAMA_7B = ModelConfig(num_layers=32, hidden_size=4096, ffn_hidden_size=11008, num_attention_heads=32, vocab_size=32000)


def test_llama_7b_costs_what_is_known() -> None:
    assert flops_per_token(LLAMA_7B, 4096) == 42_863_689_728


def test_it_is_six_times_the_matrix_weights_plus_causal_attention() -> None:
    matrices = 2 * (32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 48) + 32 * 131
    assert flops_per_token(LLAMA, 0) == 6 * matrices
    assert flops_per_token(LLAMA, 10) - flops_per_token(LLAMA, 0) == 6 * 2 * 32 * 10


def test_an_mlp_without_gate_has_two_matrices_and_tying_saves_nothing() -> None:
    matrices = 2 * (4 * 32 * 32 + 2 * 32 * 128) + 32 * 131
    assert flops_per_token(GPT2, 0) == 6 * matrices
    assert flops_per_token(replace(GPT2, untie_embeddings_and_output_weights=True), 0) == 6 * matrices


MIXTRAL_8X7B = replace(LLAMA_7B, ffn_hidden_size=14336, num_query_groups=8, num_experts=8, moe_router_topk=2)


def test_a_mixture_costs_what_its_active_experts_cost() -> None:
    dense = replace(MIXTRAL_8X7B, num_experts=None, ffn_hidden_size=2 * 14336)
    assert flops_per_token(MIXTRAL_8X7B, 4096) == flops_per_token(dense, 4096)
    # 12.88 B active parameters less the embedding, norms and routers, and causal attention.
    matrices = 32 * (4096 * (2 * 4096 + 2 * 1024) + 2 * 3 * 4096 * 14336) + 4096 * 32000
    assert flops_per_token(MIXTRAL_8X7B, 4096) == 6 * matrices + 6 * 32 * 4096 * 4096


def test_dense_layers_among_those_with_experts_and_the_shared_expert_count() -> None:
    mixed = replace(LLAMA, num_experts=8, moe_layer_freq="[0]*1+[1]*1", moe_router_topk=3, moe_ffn_hidden_size=20)
    shared = replace(mixed, moe_shared_expert_intermediate_size=12)
    attention = 32 * (32 + 2 * 16) + 32 * 32
    assert flops_per_token(mixed, 0) == 6 * (2 * attention + 3 * 32 * 48 + 3 * 3 * 32 * 20 + 32 * 131)
    assert flops_per_token(shared, 0) - flops_per_token(mixed, 0) == 6 * 3 * 32 * 12
    assert flops_per_token(replace(mixed, num_experts=64), 7) == flops_per_token(mixed, 7)


def test_latent_attention_counts_its_two_steps_and_its_own_widths() -> None:
    latent = replace(
        LLAMA,
        num_query_groups=None,
        multi_latent_attention=True,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_head_dim=8,
        qk_pos_emb_head_dim=4,
        v_head_dim=6,
    )
    query, keys_and_values, out = 24 * (32 + 4 * 12), 32 * (16 + 4) + 16 * 4 * (8 + 6), 4 * 6 * 32
    matrices = 2 * (query + keys_and_values + out + 3 * 32 * 48) + 32 * 131
    assert flops_per_token(latent, 0) == 6 * matrices
    assert flops_per_token(latent, 10) - flops_per_token(latent, 0) == 3 * 2 * 4 * (12 + 6) * 10
    direct = replace(latent, q_lora_rank=None)
    assert flops_per_token(direct, 0) - flops_per_token(latent, 0) == 6 * 2 * (32 * 4 * 12 - query)
