"""The dynamic loss scale, with Megatron-LM's rules."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.config.config import PrecisionConfig
from nanotrain.precision.loss_scale import LossScale


def scale(**fields) -> LossScale:
    defaults = {"initial_loss_scale": 1024.0, "loss_scale_window": 3, "hysteresis": 2}
    return LossScale(PrecisionConfig(params_dtype="fp16", **(defaults | fields)))


def after(loss_scale: LossScale, steps: str) -> list[float]:
    """The scale after each step: "o" overflows, "c" is clean."""
    scales = []
    for step in steps:
        loss_scale.update(torch.tensor(float(step == "o")))
        scales.append(float(loss_scale.scale))
    return scales


def test_it_halves_at_the_overflow_that_uses_up_the_hysteresis_and_at_every_further_one():
    assert after(scale(), "oooo") == [1024, 512, 256, 128]
    assert after(scale(hysteresis=1), "oo") == [512, 256]
    assert after(scale(hysteresis=3), "ooo") == [1024, 1024, 512]


def test_clean_steps_between_overflows_do_not_restore_the_hysteresis_before_the_window_is_full():
    assert after(scale(), "occo") == [1024, 1024, 1024, 512]


def test_a_full_window_doubles_it_and_restores_the_hysteresis():
    assert after(scale(), "cccccc") == [1024, 1024, 2048, 2048, 2048, 4096]
    assert after(scale(), "occcoo") == [1024, 1024, 1024, 2048, 2048, 1024]


def test_an_overflow_begins_the_window_anew():
    assert after(scale(hysteresis=9), "ccocc") == [1024] * 5
    assert after(scale(hysteresis=9), "ccoccc")[-1] == 2048


def test_a_constant_scale_of_fp16_never_changes_and_is_not_taken_from_a_run_with_a_dynamic_one():
    constant = scale(loss_scale=512.0)
    assert after(constant, "occco") == [512] * 5
    constant.load_state_dict(scale().state_dict())
    assert constant.scale == 512
    dynamic = scale()
    dynamic.load_state_dict(constant.state_dict())
    assert float(dynamic.scale) == 1024


def test_it_never_falls_below_the_minimum():
    assert after(scale(min_loss_scale=300.0), "oooo") == [1024, 512, 300, 300]


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_other_formats_keep_a_scale_of_one(kind):
    fixed = LossScale(PrecisionConfig(params_dtype=kind))
    assert set(after(fixed, "o" * 5 + "c" * 5000)) == {1.0}
    fixed.load_state_dict(scale().state_dict())  # of a run in fp16
    assert fixed.scale == 1.0


@pytest.mark.parametrize("has_flag", [True, False])  # checkpoints of format 1 have none
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_fp16_resumed_from_another_dtype_starts_at_the_initial_loss_scale(kind, has_flag):
    saved = LossScale(PrecisionConfig(params_dtype=kind))
    after(saved, "ccoc")
    state = saved.state_dict()
    if not has_flag:
        del state["is_dynamic"]
    resumed = scale()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == scale().state_dict() and resumed.scale == 1024.0


@pytest.mark.parametrize(("steps", "expected"), [("oooc", 256.0), ("o" * 12 + "c", 1.0)])
def test_a_format_1_checkpoint_of_fp16_keeps_its_scale(steps, expected):
    saved, resumed = scale(), scale()
    after(saved, steps)
    state = saved.state_dict()
    del state["is_dynamic"]
    resumed.load_state_dict(state)
    assert resumed.state_dict() == saved.state_dict() and resumed.scale == expected


@given(st.text("oc", max_size=30), st.text("oc", max_size=30))
def test_resuming_goes_on_as_if_never_stopped(before, behind):
    never_stopped, saved, resumed = scale(), scale(), scale(initial_loss_scale=2.0)
    after(never_stopped, before)
    after(saved, before)
    resumed.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert after(resumed, behind) == after(never_stopped, behind)
