"""Saved bytes by recomputed module, weights of experts, and pairs of tokens."""

import pytest

from nanotrain.spec.operators import Attention, ExpertProduct, Norm, Product, Saved
from nanotrain.spec.shape import Chunks


def test_saved_bytes_are_dropped_by_any_of_their_modules() -> None:
    saved = Saved(8, dropped_by=("mlp", "moe"))
    assert [saved.bytes_with(modules) for modules in ((), {"mlp"}, {"moe"}, {"core_attn"})] == [
        8,
        0,
        0,
        8,
    ]


def test_inputs_of_a_recomputed_module_are_kept_with_it_only() -> None:
    saved = Saved(8, dropped_by=("layernorm",), only_with="moe")
    assert [saved.bytes_with(modules) for modules in ((), {"moe"}, {"moe", "layernorm"})] == [
        0,
        8,
        0,
    ]


def test_an_operator_keeps_the_sum_of_what_it_saves() -> None:
    norm = Norm(name="layernorm", numel=4, saves=(Saved(8), Saved(4, dropped_by=("layernorm",))))
    assert (norm.saved_bytes(), norm.saved_bytes({"layernorm"})) == (12, 8)


def test_a_token_uses_the_weights_of_the_experts_that_it_chooses() -> None:
    experts = ExpertProduct(
        name="up", weights=(), rows=6, outputs=4, inputs=2, num_experts=8, topk=2, num_choices=16
    )
    dense = Product(name="up", weights=(), rows=6, outputs=4, inputs=2)
    assert (dense.active_weights, experts.active_weights) == (8, 8)
    assert dense.flops == 2 * 6 * 4 * 2


@pytest.mark.parametrize(("window", "pairs"), [(None, 16 / 2 + 4 / 2), (2, 2 * 4 - 2 + 2)])
def test_attention_counts_the_causal_half_of_pairs_within_chunks_and_window(
    window: int | None, pairs: float
) -> None:
    attention = Attention(
        name="core_attn",
        batch=3,
        heads=2,
        kv_heads=1,
        head_dim=8,
        value_head_dim=4,
        chunks=(Chunks(1, 4), Chunks(1, 2)),
        window=window,
    )
    assert attention.sequence_flops == 3 * 2 * (8 + 4) * 2 * pairs
