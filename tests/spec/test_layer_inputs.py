"""Inputs of layers: the operators multiply with the declared weights, and keep what is stated."""

from dataclasses import replace

from nanotrain.config.model import ModelConfig
from nanotrain.spec.counts import flops_per_token, num_parameters
from nanotrain.spec.declaration import Declaration
from nanotrain.spec.layer_inputs import half_operators, input_operators
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.parameters import declare_stage
from nanotrain.spec.shape import ModelShape
from nanotrain.spec.stages import stages_of_lengths

PLAIN = ModelConfig(num_layers=3, hidden_size=32, num_attention_heads=4, vocab_size=100)
MODEL = replace(PLAIN, layer_input_size=8)
PRODUCTS = 3 * (32 * 8 + 8 * 32) + 3 * 8 * 32  # of all layers, and of all inputs


def test_parameters_and_flops_of_a_model() -> None:
    plain, shape = ModelShape.of(PLAIN), ModelShape.of(MODEL)
    norms = 3 * 32 + 8
    table = 100 * 3 * 8
    assert num_parameters(shape) - num_parameters(plain) == PRODUCTS + norms + table
    assert flops_per_token(shape, 16) - flops_per_token(plain, 16) == 6 * PRODUCTS


def test_the_first_stage_has_the_second_embedding() -> None:
    shape = ModelShape.of(replace(MODEL, untie_embeddings_and_output_weights=False))
    declare = Declaration(shape, "bf16", tensor_parallel_size=2, sequence_parallel=True)
    first, last = stages_of_lengths((1, 2))
    units = {spec.name: spec for spec in declare_stage(declare, first)}
    table = units["layer_inputs.embedding.weight"]
    assert table.shape == (128, 24) and table.unit == "layer_inputs"
    assert [shard.axis for shard in table.shards] == ["tp"]
    for name in ("layer_inputs.projection.weight", "layers.0.layer_input.gate.weight"):
        assert units[name].grad_sum_axes == ("tp",) and not units[name].shards
    names = {spec.name for spec in declare_stage(declare, last)}
    assert "embedding.word.weight" in names  # the tied head, without the second embedding
    assert not any(name.startswith("layer_inputs") for name in names)


def test_saved_bytes_shrink_with_the_hidden_states_of_a_rank() -> None:
    sizes = LayerSizes.for_model(ModelShape.of(MODEL), seq_length=16)
    sharded = replace(sizes, tp=2, sequence_parallel=True)
    for operators in (input_operators, half_operators):
        one = sum(operator.saved_bytes() for operator in operators(sizes))
        assert one == 2 * sum(operator.saved_bytes() for operator in operators(sharded)) > 0
    assert input_operators(replace(sizes, shape=ModelShape.of(PLAIN))) == []
