"""Rotary positions in config.json: every kind comes back equal."""

from dataclasses import replace

import pytest

from nanotrain.config.config import ModelConfig
from nanotrain.hf.rope import read_rope, write_rope
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
