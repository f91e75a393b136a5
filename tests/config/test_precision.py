"""The section of data types: in which type gradients are accumulated."""

import pytest

from nanotrain.config.precision import PrecisionConfig


@pytest.mark.parametrize(
    ("settings", "is_fp32"),
    [
        ({}, True),
        ({"grad_reduce_in_bf16": True}, False),
        ({"main_grads_dtype": "bf16"}, False),
        ({"main_grads_dtype": "bf16", "accumulate_allreduce_grads_in_fp32": True}, True),
        ({"accumulate_allreduce_grads_in_fp32": False}, False),
    ],
)
def test_gradients_accumulate_in_fp32_unless_a_setting_asks_otherwise(settings, is_fp32):
    assert PrecisionConfig(**settings).accumulates_grads_in_fp32 is is_fp32


def test_fp8_is_a_section_that_a_run_may_not_have():
    assert PrecisionConfig().fp8 is None
