"""Softmax attention, pure: rows that QK-clip scales, FLOPs of pairs, and the gate of the output."""

from dataclasses import replace

import pytest

from nanotrain.config.model import MLAConfig, ModelConfig
from nanotrain.spec.declaration import Declaration
from nanotrain.spec.kinds import MIXERS
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.params import Shard
from nanotrain.spec.shape import ModelShape

PLAIN = ModelConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, vocab_size=8
)
MLA = replace(PLAIN, multi_latent_attention=True, mla=MLAConfig(None, 16, 8, 4, 6))


def pair_flops(shape: ModelShape, layer: int, *, seq_length: int) -> int:
    """Forward FLOPs of the pairs of tokens of a sequence."""
    sizes = LayerSizes.for_model(shape, seq_length=seq_length).at(layer)
    return sum(operator.sequence_flops for operator in MIXERS["attention"].operators(sizes))


@pytest.mark.parametrize(("name", "model"), [("attention", PLAIN), ("mla", MLA)])
def test_scaled_rows_are_all_rows_of_queries_and_keys(name: str, model: ModelConfig) -> None:
    shape, kind = ModelShape.of(model), MIXERS[name]
    specs = {spec.name: spec for spec in kind.declare(Declaration(shape, "fp32"))}
    heads = {
        "query": shape.num_heads,
        "both": shape.num_heads,
        "key": shape.query_groups,
        "none": shape.query_groups,
    }
    assert kind.clipped_rows is not None
    rows = {
        name: sum(heads[who] * size for who, size in parts)
        for name, parts in kind.clipped_rows(shape).items()
    }
    declared = {name: specs[name].shape[0] for name in rows.keys() & specs.keys()}
    assert len(declared) == 2 and declared.items() <= rows.items()


def test_pairs_are_those_of_the_chunks_where_a_layer_attends_within_them() -> None:
    shape = ModelShape.of(replace(PLAIN, attention_chunk_size=4, window_attn_skip_freq="[1,0]"))
    chunks, full = (pair_flops(shape, layer, seq_length=10) for layer in (0, 1))
    assert chunks / full == (4**2 + 4**2 + 2**2) / 10**2
    assert pair_flops(shape, 0, seq_length=3) == pair_flops(shape, 1, seq_length=3)


def test_pairs_are_those_of_the_window_where_a_layer_has_one() -> None:
    shape = ModelShape.of(replace(PLAIN, window_size=3, window_attn_skip_freq="[1,0]"))
    pairs = [sum(min(i + 1, limit) for i in range(10)) for limit in (3, 10)]
    found = [pair_flops(shape, layer, seq_length=10) for layer in range(2)]
    # two products of 2 FLOPs per channel and pair; a pair on the diagonal is half
    assert [flops / (4 * 4 * 8) for flops in found] == [pairs[0] - 1.5, pairs[1] - 5]


def test_the_gate_has_the_heads_of_the_queries() -> None:
    shape = ModelShape.of(replace(PLAIN, attention_output_gate=True))
    specs = {spec.name: spec for spec in MIXERS["attention"].declare(Declaration(shape, "fp32"))}
    assert specs["gate.weight"].shape == (32, 32) and specs["gate.weight"].shards == (
        Shard(0, "tp"),
    )


def test_weight_decay_applies_to_all_parameters_where_it_is_asked_for() -> None:
    model = replace(PLAIN, qk_layernorm=True, normalization="LayerNorm", add_bias_linear=True)
    for decays in (False, True):
        declare = Declaration(ModelShape.of(model), "fp32", decays_vectors=decays)
        specs = MIXERS["attention"].declare(declare)
        assert {spec.weight_decay for spec in specs if len(spec.shape) == 1} == {decays}
        assert all(spec.weight_decay for spec in specs if len(spec.shape) > 1)


@pytest.mark.parametrize("across_heads", [False, True])
def test_weight_decay_applies_to_the_norms_of_queries_and_keys_where_it_is_asked_for(
    across_heads: bool,
) -> None:
    model = replace(
        PLAIN, qk_layernorm=True, qk_layernorm_across_heads=across_heads, normalization="LayerNorm"
    )
    for decays in (False, True):
        declare = Declaration(ModelShape.of(model), "fp32", decays_qk_norm=decays)
        specs = MIXERS["attention"].declare(declare)
        norms = {spec.name for spec in specs if "norm" in spec.name}
        assert {spec.name for spec in specs if spec.weight_decay and "norm" in spec.name} == (
            norms if decays else set()
        )
        assert {spec.name for spec in specs if spec.weight_decay} >= {
            "query.weight",
            "output.weight",
        }
