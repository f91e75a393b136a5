"""Nested sections of the model: what follows from their fields."""

from typing import get_args

import pytest

from nanotrain.config.layer_kinds import (
    LINEAR_ATTENTION,
    LinearAttentionType,
    MLAConfig,
    MoEConfig,
)
from nanotrain.model.sublayers import MIXER_MODULES
from nanotrain.spec.kinds import MIXERS


@pytest.mark.parametrize(
    ("settings", "scales"),
    [
        ({}, (1.0, 1.0)),
        ({"scale_lora": True, "kv_lora_rank": 16}, (1.0, 4.0)),  # queries are not compressed
        ({"scale_lora": True, "kv_lora_rank": 16, "q_lora_rank": 64}, (2.0, 4.0)),
    ],
)
def test_compressed_heads_are_scaled_by_the_root_of_their_compression(settings, scales):
    assert MLAConfig(**settings).lora_scales(256) == scales


def test_zero_experts_are_choices_without_weights():
    moe = MoEConfig(num_experts=6, num_zero_experts=2, router_topk=4)
    assert (moe.num_choices, moe.mean_topk) == (8, 3.0)


@pytest.mark.parametrize(
    ("settings", "may_drop"),
    [({}, False), ({"num_zero_experts": 1}, True), ({"expert_capacity_factor": 1.5}, True)],
)
def test_pairs_are_dropped_by_a_capacity_or_by_zero_experts(settings, may_drop):
    assert MoEConfig(num_experts=4, **settings).may_drop is may_drop


def test_the_kinds_of_the_flag_are_those_of_the_tables() -> None:
    assert set(get_args(LinearAttentionType)) == set(LINEAR_ATTENTION)
    assert set(LINEAR_ATTENTION) < set(MIXERS)
    assert set(MIXERS) == set(MIXER_MODULES)
