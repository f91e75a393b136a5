"""Attention to selected blocks, pure: what tp shards, FLOPs, and bytes over cp."""

from dataclasses import replace

import pytest

from nanotrain.config.layer_kinds import DSAConfig
from nanotrain.config.model import ModelConfig
from nanotrain.spec.declaration import Declaration
from nanotrain.spec.kinds import MIXERS
from nanotrain.spec.kinds.block_sparse import gathers_blocks
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.operators import GatheredBlocks, Indexer, SparseAttention
from nanotrain.spec.shape import ModelShape
from tests.spec.kinds.sent import sent_over_cp

MODEL = ModelConfig(
    num_layers=1,
    hidden_size=32,
    vocab_size=8,
    num_attention_heads=8,
    num_query_groups=4,
    sparse_attention_type="blocks",
    dsa=DSAConfig(n_heads=4, head_dim=6, topk=16, block_size=4),
)
SHAPE, KIND = ModelShape.of(MODEL), MIXERS["block_sparse"]


def test_some_layers_select_blocks() -> None:
    model = replace(MODEL, num_layers=3, dsa=replace(MODEL.dsa, layer_freq="[0]+[1]*2"))
    assert model.mixers == ("attention", "block_sparse", "block_sparse")


def test_tp_shards_index_queries_with_the_heads_of_keys() -> None:
    specs = {spec.name: spec for spec in KIND.declare(Declaration(SHAPE, "fp32", 2, True))}
    attention = MIXERS["attention"].declare(Declaration(SHAPE, "fp32", 2, True))
    indexer = {
        name.removeprefix("indexer."): (spec.shape, bool(spec.shards), spec.grad_sum_axes)
        for name, spec in specs.items()
        if name.startswith("indexer")
    }
    assert [*specs.values()][: len(attention)] == [*attention]
    assert indexer == {
        "query.weight": ((24, 32), True, ()),
        "key.weight": ((6, 32), False, ("tp",)),
        "query_norm.weight": ((6,), False, ("tp",)),
        "key_norm.weight": ((6,), False, ("tp",)),
    }


def forward_flops(kind: str, topk: int, length: int) -> int:
    shape = replace(SHAPE, dsa=replace(MODEL.dsa, topk=topk))
    sizes = LayerSizes.for_model(shape, seq_length=length)
    return sum(operator.sequence_flops for operator in MIXERS[kind].operators(sizes))


def test_flops_grow_with_the_selected_blocks_and_scores_of_the_index_with_all() -> None:
    dense = forward_flops("attention", 64, 64)
    of_index = 4 * 6 * 64**2
    assert forward_flops("block_sparse", 64, 64) == dense + of_index
    pairs = sum(min(position + 1, 16) for position in range(64))
    of_attention = forward_flops("block_sparse", 16, 64) - of_index
    assert of_attention == pytest.approx(2 * 8 * (4 + 4) * pairs, rel=0.02)


def test_long_sequences_gather_blocks_and_others_mask_them() -> None:
    for length, gathers in ((128, False), (129, True)):
        sizes = LayerSizes.for_model(SHAPE, seq_length=length)
        kinds = [type(operator) for operator in KIND.operators(sizes)]
        assert (GatheredBlocks in kinds) == gathers and (SparseAttention in kinds) != gathers
    assert not gathers_blocks(replace(SHAPE, has_score_options=True), 129)


def test_a_tp_rank_has_the_index_of_its_heads() -> None:
    (indexer,) = (
        operator
        for operator in KIND.operators(LayerSizes(SHAPE, batch_size=2, seq_length=8, tp=2))
        if isinstance(operator, Indexer)
    )
    assert indexer.heads == 2 and not indexer.sums_over_tp


def test_keys_values_and_index_keys_are_gathered_over_cp() -> None:
    rank = LayerSizes(SHAPE, batch_size=2, seq_length=5, tp=2, cp=4, cp_comm_type="allgather")
    num_bytes = 3 * 10 * (2 * (4 + 4) + 6) * 2
    assert sent_over_cp("block_sparse", rank) == {
        "all_gather": (num_bytes, 0),
        "reduce_scatter": (0, num_bytes),
    }
