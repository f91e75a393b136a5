"""Sections that describe the same model are equal in canonical form, others are not."""

from dataclasses import replace

import pytest

from nanotrain.config.model import MoEConfig, YarnConfig
from nanotrain.interop.hf.canonical import canonical, free_keys
from tests.model.building import GPT2, LLAMA, LLAMA3, YARN


def test_settings_without_effect_make_no_difference() -> None:
    assert canonical(
        replace(LLAMA, yarn=YarnConfig(mscale=0.3), rope_scaling_factor=2.0)
    ) == canonical(LLAMA)
    assert canonical(replace(GPT2, rotary_base=5.0, rotary_percent=0.5)) == canonical(GPT2)
    assert canonical(replace(YARN, use_rope_scaling=True, rope_low_freq_factor=2.0)) == canonical(
        YARN
    )
    assert canonical(replace(LLAMA, kv_channels=8)) == canonical(LLAMA)
    # what it is for heads of 8
    assert canonical(replace(LLAMA, softmax_scale=8**-0.5)) == canonical(LLAMA)


def test_settings_with_effect_do() -> None:
    for model, changed in (
        (LLAMA, replace(LLAMA, rotary_percent=0.5)),
        (LLAMA, replace(LLAMA, softmax_scale=0.3)),
        (LLAMA3, replace(LLAMA3, rope_scaling_factor=2.0)),
        (YARN, replace(YARN, yarn=replace(YARN.yarn, mscale=0.3))),
        (YARN, replace(YARN, position_embedding_type="rope")),
    ):
        assert canonical(model) != canonical(changed), changed


@pytest.mark.parametrize("key", ["moe.aux_loss_coeff", "moe.router_bias_update_rate"])
def test_what_balances_a_router_is_free(key: str) -> None:
    experts = replace(LLAMA, moe=MoEConfig(num_experts=4))
    assert key in free_keys(experts) and key not in free_keys(LLAMA)
