"""Time of attention to selected keys: of all pairs where others are masked, else of the selected."""

from typing import Any

import pytest

from nanotrain.planner.hardware import gpu_of
from nanotrain.planner.operator_time import OperatorTimes
from nanotrain.planner.parts import Part
from nanotrain.spec.kinds import MIXERS
from nanotrain.spec.operators import GatheredAttention, Indexer
from tests.planner.scenarios import llama
from tests.planner.test_operator_time import block, core_attention, passes

SPARSE: dict[str, Any] = {
    "multi_latent_attention": True,
    "q_lora_rank": 256,
    "num_query_groups": None,
    "sparse_attention_type": "dsa",
    "dsa_indexer_n_heads": 16,
}


def test_sparse_attention_is_bound_by_the_scores_of_all_pairs() -> None:
    (full, _), (one, _), (two, sums), (untrained, _) = (
        passes(OperatorTimes(llama(8, **SPARSE | more)))
        for more in (
            {"sparse_attention_type": None, "dsa_indexer_n_heads": None},
            {},
            {"tp": 2},
            {"dsa_indexer_loss_coeff": 0},
        )
    )
    scores = 4096**2 / 2 * (16 * 16 + 32 * 65)  # bytes of the index and of attention, forward
    assert one.compute > full.compute + scores / gpu_of("h100").memory_bandwidth
    assert one.compute / 2 < two.compute < one.compute and untrained.compute < one.compute
    assert two.exposed["tp"] > sums.exposed["tp"]  # the loss of the index sums over all heads
    attention = core_attention(OperatorTimes(llama(8, **SPARSE)))
    pair_bytes = 32 * 65  # all heads, forward
    assert attention.forward >= 4096**2 / 2 * pair_bytes / gpu_of("h100").memory_bandwidth


def long(length: int, **values: Any) -> OperatorTimes:
    """Times of sequences of which few keys are selected."""
    positions = {"seq_length": length, "max_position_embeddings": length}
    return OperatorTimes(llama(8, **SPARSE, **positions, **values))


def gathered(times: OperatorTimes) -> Part:
    """The part of attention, after that of its up-projections."""
    *_, attention = (part for part in block(times) if part.name == "core_attn")
    return attention


def test_the_time_of_gathered_keys_grows_with_their_number() -> None:
    once, longer, fewer = (
        gathered(long(length, dsa_indexer_topk=topk))
        for length, topk in ((32768, 2048), (65536, 2048), (32768, 512))
    )
    assert longer.forward == pytest.approx(2 * once.forward, rel=0.05)
    assert fewer.forward == pytest.approx(once.forward / 4, rel=0.05)
    assert fewer.dgrad == pytest.approx(once.dgrad / 4, rel=0.05)
    assert once.flops == 2 * 32 * (1024 + 64) * 2048 * (32768 - 1024)


def test_a_loss_over_selected_keys_takes_less_than_one_over_all() -> None:
    dense, sparse = long(32768), long(32768, dsa_indexer_use_sparse_loss=True)
    operators = [MIXERS["dsa"].operators(times.sizes) for times in (dense, sparse)]
    indexers = [
        next(operator for operator in found if isinstance(operator, Indexer)) for found in operators
    ]
    assert any(isinstance(operator, GatheredAttention) for operator in operators[0])
    pairs = 32768**2 / 2
    selected = 2048 * (32768 - 1024)
    assert [indexer.loss_pairs for indexer in indexers] == [pairs, selected]
    # queries with at most 2048 keys are not scored
    assert [indexer.scored_pairs for indexer in indexers] == [pairs, pairs - 2048**2 / 2]
    (forward, _), (shorter, _) = passes(dense), passes(sparse)
    assert shorter.compute < 0.8 * forward.compute


def test_the_time_of_gathered_blocks_grows_with_their_number() -> None:
    blocks = {"sparse_attention_type": "blocks", "num_query_groups": 8, "dsa_indexer_n_heads": 8}
    parts = {}
    for length, topk in ((32768, 2048), (65536, 2048), (65536, 1024)):
        positions = {"seq_length": length, "max_position_embeddings": length}
        times = OperatorTimes(llama(8, **blocks, **positions, dsa_indexer_topk=topk))
        parts[length, topk] = core_attention(times)
    once, longer, fewer = parts.values()
    assert longer.forward == pytest.approx(2 * once.forward, rel=0.05)
    assert fewer.forward == pytest.approx(longer.forward / 2, rel=0.05)
    assert fewer.dgrad == pytest.approx(longer.dgrad / 2, rel=0.05)
