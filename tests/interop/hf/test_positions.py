"""Rotary positions in config.json: both formats, shares, bases of layers with a window, alpha."""

from dataclasses import replace

import pytest

from nanotrain.config.model import ModelConfig, YarnConfig
from nanotrain.config.schema import with_values
from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.families import config_from_hf
from nanotrain.interop.hf.positions import read_layered_rope, read_rope, write_rope
from tests.model.building import LLAMA, LLAMA3, YARN


@pytest.mark.parametrize(
    "model",
    [
        LLAMA,
        LLAMA3,
        YARN,
        replace(YARN, yarn=YarnConfig(4.0, mscale=0.7, mscale_all_dim=0.4, beta_fast=9.0)),
        *(replace(LLAMA, rotary_seq_len_interpolation_factor=factor) for factor in (1.5, 2, 8)),
        replace(LLAMA3, rope_scaling_factor=1.5),
    ],
)
def test_what_is_written_reads_back(model: ModelConfig) -> None:
    fields = read_rope(write_rope(model))
    assert with_values(model, fields) == model and fields["rotary_base"] == model.rotary_base
    factor = model.rotary_seq_len_interpolation_factor
    assert fields.get("rotary_seq_len_interpolation_factor", 1.0) == factor
    scaled = model.rope_scaling_factor if model.use_rope_scaling else None
    assert fields.get("rope_scaling_factor") == scaled


def test_a_share_of_the_channels_is_read_where_the_family_has_it() -> None:
    half = write_rope(replace(LLAMA, rotary_percent=0.5))
    assert read_rope(half, has_partial=True)["rotary_percent"] == 0.5
    parameters = {
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}
    }
    assert read_rope(parameters, has_partial=True)["rotary_percent"] == 0.5


def test_the_newer_format_comes_first_and_what_is_absent_is_the_default_of_transformers() -> None:
    both = {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert read_rope(both)["rotary_base"] == 5e5
    yarn = read_rope(
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 64}
    )
    assert (
        yarn["yarn.beta_fast"],
        yarn["yarn.beta_slow"],
        yarn["yarn.original_max_position_embeddings"],
    ) == (
        32,
        1,
        64,
    )


def test_layers_with_a_window_have_a_base_of_their_own_and_no_scaling() -> None:
    full, sliding = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, {"rope_theta": 2e4}
    raw = {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}
    fields = read_layered_rope(raw)
    assert (fields["rotary_base"], fields["rotary_base_local"]) == (1e6, 2e4)
    assert fields["rotary_seq_len_interpolation_factor"] == 8.0
    sliding["rope_type"] = "linear"
    with pytest.raises(HuggingFaceError, match="rope_type of sliding_attention"):
        read_layered_rope(raw)


def test_an_alpha_is_a_base_of_the_frequencies() -> None:
    rope = {"rope_type": "dynamic", "alpha": 9.0, "factor": 1.0, "rope_theta": 1e4}
    fields = {
        "model_type": "hunyuan_v1_dense",
        "hidden_size": 32,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    assert config_from_hf(fields | {"rope_parameters": rope}).rotary_base == pytest.approx(
        1e4 * 9 ** (16 / 14)
    )
