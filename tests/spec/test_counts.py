"""Parameter counts and FLOPs; the published sizes of models are in test_recipes.py."""

from dataclasses import replace

import pytest

from nanotrain.config.model import MLAConfig, ModelConfig, MoEConfig, MTPConfig
from nanotrain.spec.counts import flops_per_token, num_active_parameters, num_parameters, peak_flops
from nanotrain.spec.shape import ModelShape
from tests.model.building import GPT2, LLAMA

SMALL = ModelConfig(num_layers=4, hidden_size=8, num_attention_heads=1, vocab_size=10)
# An expert has three matrices of 8 x 16, the router 6 rows of 8.
EXPERTS = replace(
    SMALL, moe=MoEConfig(num_experts=6, router_topk=2, ffn_hidden_size=16, layer_freq="[0]+[1]*3")
)
EXPERT, ROUTER, DENSE = 3 * 8 * 16, 6 * 8, 3 * 8 * 64


def count(model: ModelConfig) -> int:
    return num_parameters(ModelShape.of(model))


def count_active(model: ModelConfig) -> int:
    return num_active_parameters(ModelShape.of(model))


def flops(model: ModelConfig, seq_length: int) -> int:
    return flops_per_token(ModelShape.of(model), seq_length)


def test_biases_are_counted_where_they_are():
    """Per block: qkv biases 3 x 8; with add_bias_linear also the output's 8, gate's and up's 64
    each, and down's 8.
    """
    plain = count(SMALL)
    assert count(replace(SMALL, add_qkv_bias=True)) - plain == 4 * 24
    assert count(replace(SMALL, add_bias_linear=True)) - plain == 4 * (24 + 8 + 64 + 64 + 8)


def test_experts_take_the_place_of_the_mlp_where_the_pattern_says_so():
    assert count(EXPERTS) - count(SMALL) == 3 * (6 * EXPERT + ROUTER - DENSE)


def test_a_token_meets_its_experts_and_everything_else():
    assert count(EXPERTS) - count_active(EXPERTS) == 3 * 4 * EXPERT
    shared = replace(EXPERTS, moe=replace(EXPERTS.moe, shared_expert_intermediate_size=32))
    for counted in (count, count_active):
        assert counted(shared) - counted(EXPERTS) == 3 * 3 * 8 * 32, counted.__name__


def test_latent_attention_has_matrices_down_and_up_and_a_norm_at_each_latent():
    plain = count(SMALL) - 4 * 4 * 8 * 8
    sizes = {"kv_lora_rank": 5, "qk_head_dim": 4, "qk_pos_emb_head_dim": 2, "v_head_dim": 3}
    latent = replace(
        SMALL, multi_latent_attention=True, num_attention_heads=2, mla=MLAConfig(**sizes)
    )
    keys_and_output = 8 * (5 + 2) + 5 + 5 * 2 * (4 + 3) + 2 * 3 * 8
    assert count(latent) - plain == 4 * (keys_and_output + 8 * 2 * 6)
    with_query_latent = replace(latent, mla=replace(latent.mla, q_lora_rank=7))
    assert count(with_query_latent) - plain == 4 * (keys_and_output + 8 * 7 + 7 + 7 * 2 * 6)


LLAMA_7B = ModelConfig(
    num_layers=32, hidden_size=4096, ffn_hidden_size=11008, num_attention_heads=32, vocab_size=32000
)


def test_llama_7b_costs_what_is_known() -> None:
    assert flops(LLAMA_7B, 4096) == 42_863_689_728


def test_it_is_six_times_the_matrix_weights_plus_causal_attention() -> None:
    matrices = 2 * (32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 48) + 32 * 131
    assert flops(LLAMA, 0) == 6 * matrices
    assert flops(LLAMA, 10) - flops(LLAMA, 0) == 6 * 2 * 32 * 10


def test_multi_token_prediction_costs_a_block_a_projection_and_the_head_again() -> None:
    more = replace(LLAMA, mtp=MTPConfig(num_layers=2))
    block = 32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 48
    assert flops(more, 0) - flops(LLAMA, 0) == 6 * 2 * (block + 2 * 32 * 32 + 32 * 131)
    assert flops(more, 10) - flops(more, 0) == 2 * (flops(LLAMA, 10) - flops(LLAMA, 0))
    assert count(more) - count(LLAMA) == 2 * (block + 2 * 32 + 2 * 32 * 32 + 3 * 32)


def test_an_mlp_without_gate_has_two_matrices_and_tying_saves_nothing() -> None:
    matrices = 2 * (4 * 32 * 32 + 2 * 32 * 128) + 32 * 131
    assert flops(GPT2, 0) == 6 * matrices
    assert flops(replace(GPT2, untie_embeddings_and_output_weights=True), 0) == 6 * matrices


MIXTRAL_8X7B = replace(
    LLAMA_7B, ffn_hidden_size=14336, num_query_groups=8, moe=MoEConfig(num_experts=8, router_topk=2)
)


def test_a_mixture_costs_what_its_active_experts_cost() -> None:
    dense = replace(MIXTRAL_8X7B, moe=None, ffn_hidden_size=2 * 14336)
    assert flops(MIXTRAL_8X7B, 4096) == flops(dense, 4096)
    # 12.88 B active parameters less the embedding, norms and routers, and causal attention.
    matrices = 32 * (4096 * (2 * 4096 + 2 * 1024) + 2 * 3 * 4096 * 14336) + 4096 * 32000
    assert flops(MIXTRAL_8X7B, 4096) == 6 * matrices + 6 * 32 * 4096 * 4096


def test_dense_layers_among_those_with_experts_and_the_shared_expert_count() -> None:
    mixed = replace(
        LLAMA,
        moe=MoEConfig(num_experts=8, layer_freq="[0]*1+[1]*1", router_topk=3, ffn_hidden_size=20),
    )
    shared = replace(mixed, moe=replace(mixed.moe, shared_expert_intermediate_size=12))
    attention = 32 * (32 + 2 * 16) + 32 * 32
    assert flops(mixed, 0) == 6 * (2 * attention + 3 * 32 * 48 + 3 * 3 * 32 * 20 + 32 * 131)
    assert flops(shared, 0) - flops(mixed, 0) == 6 * 3 * 32 * 12
    assert flops(replace(mixed, moe=replace(mixed.moe, num_experts=64)), 7) == flops(mixed, 7)


def test_latent_attention_counts_its_two_steps_and_its_own_widths() -> None:
    latent = replace(
        LLAMA,
        num_query_groups=None,
        multi_latent_attention=True,
        mla=MLAConfig(
            q_lora_rank=24, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=6
        ),
    )
    query, keys_and_values, out = 24 * (32 + 4 * 12), 32 * (16 + 4) + 16 * 4 * (8 + 6), 4 * 6 * 32
    matrices = 2 * (query + keys_and_values + out + 3 * 32 * 48) + 32 * 131
    assert flops(latent, 0) == 6 * matrices
    assert flops(latent, 10) - flops(latent, 0) == 3 * 2 * 4 * (12 + 6) * 10
    direct = replace(latent, mla=replace(latent.mla, q_lora_rank=None))
    assert flops(direct, 0) - flops(latent, 0) == 6 * 2 * (32 * 4 * 12 - query)


def test_a_window_leaves_out_the_pairs_before_it() -> None:
    plain = ModelConfig(num_layers=4, vocab_size=10)
    window = replace(plain, window_size=8, window_attn_skip_freq="2")
    seq_length = 32
    # before each query; its own counts half, as in S^2 / 2
    pairs = sum(min(query, 8) for query in range(seq_length))
    expected = 2 * (seq_length**2 - 2 * pairs - 8)
    width = 3 * 2 * plain.hidden_size
    difference = flops_per_token(ModelShape.of(plain), seq_length) - flops_per_token(
        ModelShape.of(window), seq_length
    )
    assert difference == width * expected // seq_length


@pytest.mark.parametrize(
    ("device_name", "dtype", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "fp32", 66.9e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 NVL", "bf16", 835.5e12),
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA GH200 480GB", "fp16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "fp8", 1978.9e12),
        ("NVIDIA H200", "fp8", 1978.9e12),
        ("NVIDIA B200", "bf16", 2.25e15),
        ("NVIDIA GB200", "bf16", 2.5e15),
        ("Tesla V100-SXM2-32GB", "fp16", 125e12),
    ],
)
def test_a_known_card_has_the_peak_of_its_data_sheet(
    device_name: str, dtype: str, peak: float
) -> None:
    assert peak_flops(device_name, dtype) == peak


@pytest.mark.parametrize(
    ("device_name", "dtype"),
    [
        ("AMD EPYC 7763 64-Core Processor", "fp32"),
        ("NVIDIA RTX A1000", "bf16"),  # contains the name of another card
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16"),
        ("Tesla V100-SXM2-32GB", "bf16"),
        ("cpu", "bf16"),
    ],
)
def test_an_unlisted_card_has_no_peak(device_name: str, dtype: str) -> None:
    assert peak_flops(device_name, dtype) is None


def test_products_in_4_bits_have_a_peak_of_their_own() -> None:
    assert peak_flops("NVIDIA B200", "nvfp4") == 9.0e15
    assert peak_flops("NVIDIA GB200", "nvfp4") == 10.0e15
    assert peak_flops("NVIDIA H100 80GB HBM3", "nvfp4") is None
