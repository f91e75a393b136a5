"""Rotary positions in config.json: every kind comes back equal."""

from dataclasses import replace

import pytest

from nanotrain.config.config import ModelConfig
from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.rope import read_layered_rope, read_rope, write_rope
from tests.model.building import LLAMA, LLAMA3, YARN


@pytest.mark.parametrize("model", [LLAMA, LLAMA3, YARN, replace(YARN, mscale=0.7, mscale_all_dim=0.4, beta_fast=9.0)])
def test_what_is_written_reads_back(model: ModelConfig) -> None:
    fields = read_rope(write_rope(model))
    assert replace(model, **fields) == model and fields["rotary_base"] == model.rotary_base


def test_a_share_of_the_channels_is_read_where_the_family_has_it() -> None:
    half = write_rope(replace(LLAMA, rotary_percent=0.5))
    assert read_rope(half, has_partial=True)["rotary_percent"] == 0.5
    parameters = {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}}
    assert read_rope(parameters, has_partial=True)["rotary_percent"] == 0.5


def test_the_newer_format_comes_first_and_what_is_absent_is_the_default_of_transformers() -> None:
    both = {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert read_rope(both)["rotary_base"] == 5e5
    yarn = read_rope({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 64})
    assert (yarn["beta_fast"], yarn["beta_slow"], yarn["original_max_position_embeddings"]) == (32, 1, 64)


def test_layers_with_a_window_have_a_base_of_their_own_and_no_scaling() -> None:
    full, sliding = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, {"rope_theta": 2e4}
    raw = {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}
    fields = read_layered_rope(raw, base=1e6, local_base=1e4)
    assert (fields["rotary_base"], fields["rotary_base_local"]) == (1e6, 2e4)
    assert fields["rotary_seq_len_interpolation_factor"] == 8.0
    sliding["rope_type"] = "linear"
    with pytest.raises(HuggingFaceError, match="rope_type of sliding_attention"):
        read_layered_rope(raw, base=1e6, local_base=1e4)
