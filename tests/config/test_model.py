"""The model section: sizes that follow from its fields, and the same objects under both modules."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.config.model import ModelConfig, MoEConfig
from nanotrain.errors import ConfigError


@given(st.integers(1, 300_000), st.sampled_from([1, 64, 128]))
def test_the_padded_vocabulary_is_the_next_multiple(vocab_size, multiple):
    padded = ModelConfig(
        vocab_size=vocab_size, make_vocab_size_divisible_by=multiple
    ).padded_vocab_size
    assert padded % multiple == 0 and vocab_size <= padded < vocab_size + multiple


def test_an_open_vocabulary_is_an_error():
    with pytest.raises(ConfigError, match="--vocab-size"):
        _ = ModelConfig().padded_vocab_size


def test_what_is_set_beats_what_follows():
    model = ModelConfig(kv_channels=80, num_query_groups=2, ffn_hidden_size=1000)
    assert (model.head_dim, model.query_groups, model.ffn_size) == (80, 2, 1000)


@given(st.integers(1, 12), st.integers(1, 12))
def test_every_nth_layer_from_the_first_has_experts(num_layers, every):
    layers = ModelConfig(
        num_layers=num_layers, moe=MoEConfig(num_experts=2, layer_freq=str(every))
    ).moe_layers
    assert [index for index, has_experts in enumerate(layers) if has_experts] == list(
        range(0, num_layers, every)
    )


def test_a_pattern_has_an_entry_per_layer():
    model = ModelConfig(num_layers=5, moe=MoEConfig(num_experts=2, layer_freq="[0]*2+[1]*2"))
    with pytest.raises(ConfigError, match="for each of 5 layers, and this has 4 values"):
        _ = model.moe_layers
    assert replace(model, num_layers=4).moe_layers == (False, False, True, True)
    assert replace(model, moe=replace(model.moe, num_experts=None)).moe_layers == (False,) * 5


def test_an_expert_is_as_wide_as_the_mlp_unless_said():
    assert ModelConfig(hidden_size=64).moe_ffn_size == ModelConfig(hidden_size=64).ffn_size
    assert ModelConfig(moe=MoEConfig(ffn_hidden_size=32), ffn_hidden_size=512).moe_ffn_size == 32


@given(st.integers(1, 10_000))
def test_the_gated_mlp_is_as_large_as_the_plain_one_rounded_up_to_64(hidden):
    gated = ModelConfig(hidden_size=hidden, activation="swiglu").ffn_size
    assert gated % 64 == 0 and 0 <= gated - 8 * hidden / 3 < 64
    assert ModelConfig(hidden_size=hidden, activation="gelu").ffn_size == 4 * hidden
