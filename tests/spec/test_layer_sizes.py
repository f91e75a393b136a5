"""Sizes of a rank: tokens, local widths and the parallelism of products."""

from dataclasses import replace

import pytest

from nanotrain.config.model import ModelConfig
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.operators import Saved
from nanotrain.spec.shape import ModelShape

MODEL = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=128)
SIZES = LayerSizes(ModelShape.of(MODEL), batch_size=2, seq_length=8, tp=2, itemsize=2)


def test_sequence_parallelism_shards_the_tokens_outside_of_tensor_parallel_layers() -> None:
    assert (SIZES.tokens, SIZES.outside, SIZES.routed_tokens) == (16, 16, 8)
    assert replace(SIZES, sequence_parallel=True).outside == 8


@pytest.mark.parametrize(
    ("placement", "dropped_by"),
    [("pre", ("layernorm",)), ("sandwich", ("layernorm",)), ("post", ())],
)
def test_recomputed_norms_drop_the_input_of_a_layer_that_is_their_output(
    placement: str, dropped_by: tuple[str, ...]
) -> None:
    shape = ModelShape.of(replace(MODEL, norm_placement=placement))
    assert replace(SIZES, shape=shape).layer_input == Saved(16 * 64, dropped_by=dropped_by)


def test_products_that_share_their_input_are_one() -> None:
    product = SIZES.column({"query": 16, "key": 8})
    assert (product.rows, product.outputs, product.inputs) == (16, 24, 32)
    assert product.weights == ("query.weight", "key.weight")
    output = SIZES.row(16)
    assert (output.outputs, output.inputs, output.shard) == (32, 16, "row")


def test_layers_with_a_window_have_their_own_backend_and_heads() -> None:
    model = replace(
        MODEL, window_size=4, window_attn_skip_freq="2", num_query_groups=4, window_query_groups=2
    )
    sizes = replace(SIZES, shape=ModelShape.of(model), backend="full", window_backend="windowed")
    layers = [sizes.at(layer) for layer in range(2)]
    assert {each.attention_backend: each.shape.query_groups for each in layers} == {
        "full": 4,
        "windowed": 2,
    }
