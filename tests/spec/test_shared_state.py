"""Which layers keep state for which, and how wide messages between stages are."""

from dataclasses import replace

import pytest

from nanotrain.config.model import DSAConfig, MLAConfig, ModelConfig, MTPConfig
from nanotrain.spec.counts import num_parameters
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.parameters import declare_model
from nanotrain.spec.shape import ModelShape, Source
from nanotrain.spec.shared_state import message_width, shared_bytes

# five layers, of which all but every second one have a window; the last three read keys
MODEL = ModelConfig(
    num_layers=5,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    window_query_groups=1,
    value_channels=6,
    vocab_size=128,
    window_size=3,
    window_attn_skip_freq="2",
    num_kv_shared_layers=3,
)
# the first and the third of four layers have an indexer
SELECTIVE = ModelConfig(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=128,
    multi_latent_attention=True,
    mla=MLAConfig(q_lora_rank=8),
    sparse_attention_type="dsa",
    dsa=DSAConfig(topk=5, share_freq="2"),
    mtp=MTPConfig(num_layers=1),
)
FULL, WINDOWED = Source("key_value", 1), Source("key_value", 0)


def test_a_layer_reads_the_last_earlier_layer_of_its_type() -> None:
    shape = ModelShape.of(MODEL)
    assert [shape.sources(layer) for layer in range(5)] == [
        (),
        (),
        (WINDOWED,),
        (FULL,),
        (WINDOWED,),
    ]
    assert [shape.kept(layer) for layer in range(3)] == [(WINDOWED,), (FULL,), ()]
    # layers with rotary positions read rotated keys only
    mixed = ModelShape.of(replace(MODEL, window_size=None, no_rope_freq="[0,1,1,0,0]"))
    assert mixed.kv_sources == (None, None, 1, 0, 0)


def test_a_layer_without_an_indexer_reads_the_last_selection() -> None:
    shape = ModelShape.of(SELECTIVE)
    assert shape.selection_sources == (None, 0, None, 2)
    kinds = [shape.kinds(layer)[0] for layer in range(5)]
    # multi-token prediction, the fifth, has an indexer of its own
    assert kinds == ["dsa", "shared_dsa", "dsa", "shared_dsa", "dsa"]
    selection = Source("selection", 2)
    assert shape.carried(3) == (selection,) and not shape.carried(2)
    # three digits for each of five keys
    assert message_width(LayerSizes.for_model(shape, seq_length=16), 3) == 32 + 5 * 3


@pytest.mark.parametrize(
    "first, carried",
    [(0, ()), (1, (WINDOWED,)), (2, (WINDOWED, FULL)), (4, (WINDOWED,)), (5, ())],
)
def test_a_message_has_what_later_stages_read(first: int, carried: tuple[Source, ...]) -> None:
    shape = ModelShape.of(MODEL)
    assert shape.carried(first) == carried
    # keys of 8 and values of 6 channels, of one head in windows and of two in the others
    widths = {WINDOWED: 14, FULL: 28}
    one_rank = LayerSizes.for_model(shape, seq_length=16)
    expected = sum(widths[source] for source in carried)
    assert message_width(one_rank, first) == 32 + expected
    assert shared_bytes(one_rank, carried) == 16 * expected * one_rank.itemsize
    # each of two tp ranks has a head; with sequence parallelism one hidden state for two tokens
    two_ranks = replace(one_rank, tp=2)
    assert message_width(two_ranks, first) == 32 + 14 * len(carried)
    sharded = replace(two_ranks, sequence_parallel=True)
    assert message_width(sharded, first) == 32 + 2 * 14 * len(carried)


def test_a_layer_that_reads_keys_declares_none() -> None:
    shape = ModelShape.of(MODEL)
    names = {spec.name for spec in declare_model(shape)}
    owners = {name.split(".")[1] for name in names if ".attention.key." in name}
    assert owners == {"0", "1"}
    own = ModelShape.of(replace(MODEL, num_kv_shared_layers=0))
    heads = 1 + 2 + 1  # of layers 2, 3 and 4
    assert num_parameters(own) - num_parameters(shape) == heads * (8 + 6) * 32


def test_layers_of_linear_attention_are_no_source() -> None:
    hybrid = ModelConfig(
        num_layers=4,
        linear_attention_type="short_conv",
        linear_attention_freq="[1,0,1,0]",
        num_kv_shared_layers=2,
    )
    assert hybrid.kv_sources == (None, None, None, 1)
    assert hybrid.mixers == ("short_conv", "attention", "short_conv", "shared_kv")


def test_inputs_of_layers_are_sent_to_the_stages_that_read_them() -> None:
    shape = ModelShape.of(replace(MODEL, num_kv_shared_layers=0, layer_input_size=6))
    assert [source.layer for source in shape.carried(3)] == [3, 4]
    assert shape.carried(0) == shape.carried(5) == ()
    assert shape.kept(3) == ()
    # every tp rank has those of its hidden states
    sizes = replace(LayerSizes.for_model(shape, seq_length=16), tp=2, sequence_parallel=True)
    assert message_width(sizes, 3) == 32 + 2 * 6
    assert shared_bytes(sizes, shape.carried(3)) == 8 * 2 * 6 * sizes.itemsize
