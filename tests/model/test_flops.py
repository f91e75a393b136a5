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
