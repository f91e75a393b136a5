"""What core attention keeps, by attention backend and by how cp shares the sequence."""

from dataclasses import replace

import pytest

from nanotrain.config.model import ModelConfig
from nanotrain.spec.kinds.core_attention import core_attention
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.shape import ModelShape

MODEL = ModelConfig(
    num_layers=1, hidden_size=64, num_attention_heads=4, num_query_groups=2, vocab_size=8
)
TOKENS, HEADS, GROUPS, DIM = 8, 4, 2, 16
SIZES = replace(LayerSizes.for_model(ModelShape.of(MODEL), seq_length=TOKENS), backend="flash")
QUERY, KEY, STATISTICS = HEADS * DIM, GROUPS * DIM, HEADS * 2  # in 16 bits


def kept(sizes: LayerSizes, *modules: str) -> int:
    """Elements of 16 bits that attention keeps of a token."""
    operator = core_attention(sizes, heads=HEADS, groups=GROUPS)
    return operator.saved_bytes(modules) // (2 * TOKENS)


def test_query_key_value_output_and_log_sum_exp_are_kept() -> None:
    assert kept(SIZES) == QUERY + 2 * KEY + QUERY + STATISTICS
    assert kept(SIZES, "core_attn") == QUERY + 2 * KEY + QUERY


@pytest.mark.parametrize("backend", ["sdpa efficient", "sdpa flash"])
def test_backends_that_repeat_key_heads_keep_one_per_query_head(backend: str) -> None:
    repeated = replace(SIZES, backend=backend, device="cpu")
    assert kept(repeated) == 2 * QUERY + 2 * QUERY + STATISTICS


def test_flash_attention_pads_narrow_values_and_keeps_the_output_twice() -> None:
    shape = replace(SIZES.shape, value_head_dim=DIM // 2)
    narrow = replace(SIZES, shape=shape, backend="sdpa flash")
    assert kept(narrow) == QUERY + 2 * KEY + QUERY + QUERY // 2 + STATISTICS


def test_the_backend_math_keeps_the_weights_of_all_pairs_in_fp32() -> None:
    per_head = 2 * (3 * DIM + TOKENS) + DIM
    assert kept(replace(SIZES, backend="math")) == HEADS * per_head


@pytest.mark.parametrize(
    ("comm_type", "more"), [("p2p", 0), ("a2a", QUERY), ("allgather", QUERY + 2 * KEY)]
)
def test_gathered_keys_and_sliced_outputs_are_kept_over_cp(comm_type: str, more: int) -> None:
    shared = replace(SIZES, cp=2, cp_comm_type=comm_type)
    assert kept(shared) == kept(SIZES) + more
