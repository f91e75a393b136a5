"""Sizes that follow from the configuration."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.config.config import Activation, ModelConfig, MoEConfig, ParallelConfig, TrainConfig
from nanotrain.config.derive import (
    data_parallel_size,
    ffn_size,
    global_batch_size,
    head_dim,
    moe_ffn_size,
    moe_layers,
    num_microbatches,
    padded_vocab_size,
    query_groups,
)
from nanotrain.errors import ConfigError, TopologyError


@given(st.integers(1, 300_000), st.sampled_from([1, 64, 128]))
def test_the_padded_vocabulary_is_the_next_multiple(vocab_size, multiple):
    padded = padded_vocab_size(ModelConfig(vocab_size=vocab_size, make_vocab_size_divisible_by=multiple))
    assert padded % multiple == 0 and vocab_size <= padded < vocab_size + multiple


def test_an_open_vocabulary_is_an_error():
    with pytest.raises(ConfigError, match="--vocab-size"):
        padded_vocab_size(ModelConfig())


def test_what_is_set_beats_what_follows():
    model = ModelConfig(kv_channels=80, num_query_groups=2, ffn_hidden_size=1000)
    assert (head_dim(model), query_groups(model), ffn_size(model)) == (80, 2, 1000)


@given(st.integers(1, 12), st.integers(1, 12))
def test_every_nth_layer_from_the_first_has_experts(num_layers, every):
    layers = moe_layers(ModelConfig(num_layers=num_layers, moe=MoEConfig(num_experts=2, layer_freq=str(every))))
    assert [index for index, has_experts in enumerate(layers) if has_experts] == list(range(0, num_layers, every))


def test_a_pattern_has_an_entry_per_layer():
    model = ModelConfig(num_layers=5, moe=MoEConfig(num_experts=2, layer_freq="[0]*2+[1]*2"))
    with pytest.raises(ConfigError, match="is for 4 layers: num_layers is 5"):
        moe_layers(model)
    assert moe_layers(replace(model, num_layers=4)) == (False, False, True, True)
    assert moe_layers(replace(model, moe=replace(model.moe, num_experts=None))) == (False,) * 5


def test_an_expert_is_as_wide_as_the_mlp_unless_said():
    assert moe_ffn_size(ModelConfig(hidden_size=64)) == ffn_size(ModelConfig(hidden_size=64))
    assert moe_ffn_size(ModelConfig(moe=MoEConfig(ffn_hidden_size=32), ffn_hidden_size=512)) == 32


@given(st.integers(1, 10_000))
def test_the_gated_mlp_is_as_large_as_the_plain_one_rounded_up_to_64(hidden):
    gated = ffn_size(ModelConfig(hidden_size=hidden, activation=Activation.swiglu))
    assert gated % 64 == 0 and 0 <= gated - 8 * hidden / 3 < 64
    assert ffn_size(ModelConfig(hidden_size=hidden, activation=Activation.gelu)) == 4 * hidden


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 200))
def test_data_parallelism_is_what_the_other_axes_leave(tp, pp, cp, world):
    parallel = ParallelConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, context_parallel_size=cp)
    if world % (tp * pp * cp):
        with pytest.raises(TopologyError, match=f"{world} ranks? cannot form"):
            data_parallel_size(parallel, world)
    else:
        assert data_parallel_size(parallel, world) * tp * pp * cp == world


def test_a_global_batch_is_cut_into_whole_microbatches():
    train = TrainConfig(micro_batch_size=2, global_batch_size=24)
    assert [num_microbatches(train, dp) for dp in (1, 2, 3, 4, 5, 12)] == [12, 6, 4, 3, 3, 1]
    with pytest.raises(ConfigError, match="micro_batch_size 2 x data-parallel size 13 = 26; .* --global-batch-size 26"):
        num_microbatches(train, 13)
    with pytest.raises(ConfigError, match="micro_batch_size 5 must divide it; set --global-batch-size 30"):
        num_microbatches(TrainConfig(micro_batch_size=5, global_batch_size=24), 2)


def test_an_unset_global_batch_is_one_microbatch_a_rank():
    train = TrainConfig(micro_batch_size=3)
    assert global_batch_size(train, 5) == 15 and num_microbatches(train, 5) == 1
