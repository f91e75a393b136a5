"""DeepSeek Sparse Attention, pure: what tp replicates, FLOPs, and bytes over cp."""

from dataclasses import replace

import pytest

from nanotrain.config.layer_kinds import DSAConfig
from nanotrain.config.model import MLAConfig, ModelConfig
from nanotrain.spec.counts import flops_per_token
from nanotrain.spec.declaration import Declaration
from nanotrain.spec.kinds import MIXERS
from nanotrain.spec.kinds.dsa import gathers_keys
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.shape import ModelShape
from tests.spec.kinds.sent import sent_over_cp

MODEL = ModelConfig(
    num_layers=1,
    hidden_size=32,
    vocab_size=8,
    multi_latent_attention=True,
    mla=MLAConfig(
        q_lora_rank=24, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=6
    ),
    sparse_attention_type="dsa",
    dsa=DSAConfig(n_heads=3, head_dim=8, topk=16),
)
SHAPE, KIND = ModelShape.of(MODEL), MIXERS["dsa"]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_tp_rank_has_the_whole_indexer(sequence_parallel: bool) -> None:
    specs = {
        spec.name: spec for spec in KIND.declare(Declaration(SHAPE, "fp32", 4, sequence_parallel))
    }
    of_mla = MIXERS["mla"].declare(Declaration(SHAPE, "fp32", 4, sequence_parallel))
    indexer = {name: spec for name, spec in specs.items() if name.startswith("indexer")}
    without_fp8 = [
        replace(spec, in_fp8=spec.in_fp8 and spec.name != "kv_up.weight") for spec in of_mla
    ]
    assert [*specs.values()] == [*without_fp8, *indexer.values()]
    assert {name.removeprefix("indexer."): spec.shape for name, spec in indexer.items()} == {
        "query.weight": (24, 24),
        "key.weight": (8, 32),
        "key_norm.weight": (8,),
        "key_norm.bias": (8,),
        "head_weight.weight": (3, 32),
    }
    for spec in indexer.values():  # of a sequence shard per rank, or the same on all
        assert spec.grad_sum_axes == (("tp",) if sequence_parallel else ()) and not spec.shards
    assert {name for name, spec in indexer.items() if spec.in_fp8} == {
        "indexer.query.weight",
        "indexer.key.weight",
    }


def forward_flops(kind: str, shape: ModelShape, *, seq_length: int) -> int:
    sizes = LayerSizes.for_model(shape, seq_length=seq_length)
    return sum(operator.sequence_flops for operator in MIXERS[kind].operators(sizes))


def test_flops_grow_with_the_selected_keys_and_scores_of_the_index_with_all() -> None:
    def of_sequence(topk: int, length: int) -> int:
        shape = replace(SHAPE, dsa=replace(MODEL.dsa, topk=topk))
        return forward_flops("dsa", shape, seq_length=length)

    dense = forward_flops("mla", SHAPE, seq_length=64)
    of_index = 3 * 8 * 64**2
    assert of_sequence(64, 64) == of_sequence(1000, 64) == dense + of_index
    pairs = sum(min(position + 1, 16) for position in range(64))
    # scores and weighted sum; 16 more pairs are those that a causal mask halves
    assert of_sequence(16, 64) - of_index == pytest.approx(4 * (12 + 6) * 2 * pairs, rel=0.02)
    assert flops_per_token(SHAPE, 64) < flops_per_token(
        replace(SHAPE, dsa=replace(MODEL.dsa, topk=64)), 64
    )


def test_keys_values_and_index_keys_are_gathered_over_cp() -> None:
    rank = LayerSizes(SHAPE, batch_size=2, seq_length=5, tp=2, cp=4, cp_comm_type="allgather")
    num_bytes = 3 * 10 * (2 * (12 + 6) + 8) * 2
    assert sent_over_cp("dsa", rank) == {
        "all_gather": (num_bytes, 0),
        "reduce_scatter": (0, num_bytes),
    }


WIDE = replace(
    SHAPE,
    head_dim=192,
    value_head_dim=128,
    mla=MLAConfig(q_lora_rank=1536),
    dsa=DSAConfig(use_sparse_loss=True),
)


@pytest.mark.parametrize(
    ("heads", "tokens", "measured"),
    [(16, 2048, 747e6), (32, 4096, 1322e6), (128, 4096, 4455e6)],
)
def test_temporaries_are_bounded_by_blocks_of_queries_and_the_keys(
    heads: int, tokens: int, measured: float
) -> None:
    """Bytes that torch's operators allocate at once, counted on the meta device."""
    shape = replace(WIDE, num_heads=heads)
    sizes = LayerSizes.for_model(shape, seq_length=tokens)
    operators = KIND.operators(replace(sizes, device="cpu"))
    assert not gathers_keys(shape, tokens)
    working = max(operator.working for operator in operators)
    assert working == pytest.approx(measured, rel=0.1)
