"""Learning-rate schedules against Megatron-LM's formulas, restated here."""

import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.config.config import OptimConfig
from nanotrain.config.optim import WSDDecayStyle
from nanotrain.optim.lr import LR_DECAYS, WSD_DECAYS, LRSchedule

LR, MIN_LR, INIT_LR = 1e-3, 1e-4, 2e-4
BATCH, WARMUP, TOTAL, WSD_LENGTH = 8, 10, 100, 20  # BATCH in samples per step, the others in steps


def curve(style: str, *, batch: int = BATCH, train_iters: int = TOTAL, **optim) -> LRSchedule:
    fields = {
        "lr": LR,
        "min_lr": MIN_LR,
        "lr_warmup_init": INIT_LR,
        "lr_warmup_iters": WARMUP,
    } | optim
    return LRSchedule(
        OptimConfig(lr_decay_style=style, **fields),
        samples_per_step=batch,
        train_samples=train_iters * batch,
    )


def decay_ratio(step: float) -> float:
    return (step - WARMUP) / (TOTAL - WARMUP)


def coefficient(style: str, step: float) -> float:
    return {
        "linear": 1.0 - decay_ratio(step),
        "cosine": 0.5 * (math.cos(math.pi * decay_ratio(step)) + 1.0),
    }[style]


def test_warmup_rises_in_a_straight_line_from_its_start_to_the_peak():
    for style in LR_DECAYS:
        schedule = curve(style, lr_wsd_decay_iters=WSD_LENGTH)
        length = WARMUP * BATCH
        for samples in range(length + 1):  # batches of a ramp-up end between steps
            expected = INIT_LR + (LR - INIT_LR) * samples / length
            assert schedule.lr_at(samples) == pytest.approx(expected, rel=1e-12)


def test_without_warmup_the_first_step_has_the_peak():
    for style in LR_DECAYS:
        schedule = curve(style, lr_warmup_iters=0, lr_wsd_decay_iters=WSD_LENGTH)
        assert schedule.lr_at(0) == pytest.approx(LR)


@pytest.mark.parametrize("style", ["linear", "cosine"])
@pytest.mark.parametrize("step", [11, 30, 55, 99, 100])
def test_linear_and_cosine_decay(style, step):
    expected = MIN_LR + coefficient(style, step) * (LR - MIN_LR)
    assert curve(style).lr_at(step * BATCH) == pytest.approx(expected)


@pytest.mark.parametrize("step", [11, 40, 90, 100])
def test_inverse_square_root_falls_with_the_consumed_samples(step):
    expected = max(MIN_LR, LR * math.sqrt(WARMUP * BATCH) / math.sqrt(step * BATCH))
    assert curve("inverse-square-root").lr_at(step * BATCH) == pytest.approx(expected)


def test_inverse_square_root_stays_above_the_minimum():
    assert curve("inverse-square-root", min_lr=9e-4).lr_at(50 * BATCH) == 9e-4


def test_constant_never_falls():
    assert curve("constant").lr_at(10 * TOTAL * BATCH) == LR


@pytest.mark.parametrize("style", [style for style in LR_DECAYS if style != "constant"])
def test_after_the_decay_the_rate_is_the_minimum(style):
    assert curve(style, lr_wsd_decay_iters=WSD_LENGTH).lr_at(TOTAL * BATCH + 1) == MIN_LR


@pytest.mark.parametrize("wsd_style", get_args(WSDDecayStyle))
@pytest.mark.parametrize("done", [0.25, 0.5, 1.0])
def test_wsd_is_constant_and_then_decays_in_its_style(wsd_style, done):
    schedule = curve("WSD", lr_wsd_decay_iters=WSD_LENGTH, lr_wsd_decay_style=wsd_style)
    expected = {
        "linear": 1.0 - done,
        "cosine": 0.5 * (math.cos(math.pi * done) + 1.0),
        "exponential": 2.0 * math.pow(0.5, done) - 1.0,
        "minus_sqrt": 1.0 - math.sqrt(done),
    }[wsd_style]
    start = TOTAL - WSD_LENGTH
    assert schedule.lr_at((WARMUP + 1) * BATCH) == schedule.lr_at(start * BATCH) == LR
    consumed = round((start + done * WSD_LENGTH) * BATCH)
    assert schedule.lr_at(consumed) == pytest.approx(MIN_LR + expected * (LR - MIN_LR))


def test_the_decay_may_be_shorter_than_the_run():
    schedule = curve("linear", lr_decay_iters=50)
    assert schedule.lr_at(50 * BATCH) == pytest.approx(MIN_LR)
    assert schedule.lr_at(51 * BATCH) == MIN_LR


@pytest.mark.parametrize("style", list(LR_DECAYS))
@pytest.mark.parametrize("train_iters", [TOTAL // 2, 3 * TOTAL])
def test_a_schedule_of_its_own_length_does_not_depend_on_that_of_the_run(style, train_iters):
    fields = {"lr_warmup_iters": 0, "lr_warmup_fraction": 0.1, "lr_wsd_decay_iters": WSD_LENGTH}
    as_long = curve(style, **fields)
    schedule = curve(style, train_iters=train_iters, lr_decay_iters=TOTAL, **fields)
    for consumed in range(0, (TOTAL + 2) * BATCH, 5):
        assert schedule.lr_at(consumed) == as_long.lr_at(consumed), consumed


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("decoupled_min_lr", {"decoupled_lr": 5e-3}),
        ("lr_warmup_samples", {}),
        ("lr_warmup_fraction", {}),
        ("start_weight_decay", {"weight_decay_incr_style": "linear", "end_weight_decay": 0.1}),
        ("end_weight_decay", {"weight_decay_incr_style": "linear", "start_weight_decay": 0.1}),
    ],
)
def test_a_setting_of_0_is_not_one_that_is_unset(name, others):
    """It is the limit of small settings; an unset one follows another setting."""
    values = []
    for value in ({name: 0}, {name: 1e-9}, {}):
        schedule = curve("cosine", weight_decay=0.5, **others, **value)
        values.append(
            [
                rate
                for consumed in (1, WARMUP * BATCH // 2, TOTAL * BATCH)
                for rate in (
                    schedule.lr_at(consumed),
                    schedule.decoupled_lr_at(consumed) or 0.0,
                    schedule.weight_decay_at(consumed),
                )
            ]
        )
    zero, small, unset = values
    assert zero == pytest.approx(small, rel=1e-6, abs=1e-8)
    assert zero != pytest.approx(unset, rel=1e-2)


def test_every_decay_style_of_wsd_has_a_formula():
    assert set(WSD_DECAYS) == set(get_args(WSDDecayStyle))


@given(st.sampled_from(list(LR_DECAYS)), st.integers(0, 2 * TOTAL * BATCH))
def test_the_schedule_does_not_depend_on_the_batch_size(style, consumed):
    # Given the same lengths in samples, in half as many steps of twice the batch,
    schedule = curve(style, lr_wsd_decay_iters=WSD_LENGTH)
    with_twice_the_batch = curve(
        style,
        batch=2 * BATCH,
        train_iters=TOTAL // 2,
        lr_warmup_iters=WARMUP // 2,
        lr_wsd_decay_iters=WSD_LENGTH // 2,
    )
    assert schedule.lr_at(consumed) == pytest.approx(with_twice_the_batch.lr_at(consumed))


@given(st.sampled_from(list(LR_DECAYS)), st.integers(0, 2 * TOTAL * BATCH))
def test_the_rate_lies_between_its_ends_and_never_jumps_up_after_the_warmup(style, consumed):
    schedule = curve(style, lr_wsd_decay_iters=WSD_LENGTH)
    rate, later = schedule.lr_at(consumed), schedule.lr_at(consumed + 1)
    assert min(INIT_LR, MIN_LR) <= rate <= LR * (1 + 1e-12)
    if consumed >= WARMUP * BATCH:
        assert later <= rate * (1 + 1e-12)


def test_the_decoupled_rate_follows_its_own_peak_and_minimum():
    assert curve("cosine").decoupled_lr_at(5) is None
    for fields, peak, minimum in (
        ({"decoupled_lr": 5e-3, "decoupled_min_lr": 3e-4}, 5e-3, 3e-4),
        ({"decoupled_lr": 5e-3}, 5e-3, MIN_LR),
    ):
        schedule, own = curve("cosine", **fields), curve("cosine", lr=peak, min_lr=minimum)
        for step in (0, 5, WARMUP, 50, TOTAL, TOTAL + 1):
            assert schedule.decoupled_lr_at(step * BATCH) == own.lr_at(step * BATCH)
            assert schedule.lr_at(step * BATCH) == curve("cosine").lr_at(step * BATCH)


def test_warmup_and_decay_of_equal_length_do_not_divide_by_zero():
    schedule = curve("cosine", lr_decay_iters=WARMUP)
    assert schedule.lr_at(WARMUP * BATCH) == LR and schedule.lr_at(WARMUP * BATCH + 1) == MIN_LR


@pytest.mark.parametrize("style", ["linear", "cosine", "inverse-square-root"])
def test_samples_and_steps_mean_the_same_schedule(style):
    in_samples = curve(
        style, lr_warmup_iters=0, lr_warmup_samples=WARMUP * BATCH, lr_decay_samples=TOTAL * BATCH
    )
    in_fraction = curve(style, lr_warmup_iters=0, lr_warmup_fraction=WARMUP / TOTAL)
    for consumed in range(0, TOTAL * BATCH, 7):
        expected = pytest.approx(curve(style).lr_at(consumed))
        assert in_samples.lr_at(consumed) == expected and in_fraction.lr_at(consumed) == expected


def test_a_warmup_need_not_be_a_whole_number_of_steps():
    schedule = curve(
        "cosine", batch=128, lr_warmup_iters=0, lr_warmup_samples=3906252, lr_warmup_init=0.0
    )
    assert schedule.lr_at(30517 * 128) == pytest.approx(LR * 30517 * 128 / 3906252)


@pytest.mark.parametrize(
    ("style", "expected"),  # at 0, a quarter, a half, all and more of the samples of the run
    [
        ("constant", [0.1] * 5),
        ("linear", [0.2, 0.25, 0.3, 0.4, 0.4]),
        ("cosine", [0.2, 0.22929, 0.3, 0.4, 0.4]),
    ],
)
def test_weight_decay_grows_over_the_run_whatever_the_schedule_of_the_learning_rate(
    style, expected
):
    schedule = curve(
        "linear",
        lr_decay_iters=TOTAL // 2,
        weight_decay_incr_style=style,
        start_weight_decay=0.2,
        end_weight_decay=0.4,
    )
    steps = (0, TOTAL // 4, TOTAL // 2, TOTAL, 2 * TOTAL)
    assert [schedule.weight_decay_at(step * BATCH) for step in steps] == pytest.approx(
        expected, rel=1e-4
    )


def test_a_fraction_of_warmup_is_of_the_schedule_not_of_the_run():
    schedule = curve("linear", lr_warmup_iters=0, lr_warmup_fraction=0.1, lr_decay_iters=50)
    assert schedule.warmup_samples == pytest.approx(0.1 * 50 * BATCH)
    assert schedule.lr_at(5 * BATCH) == pytest.approx(LR)
    assert INIT_LR < schedule.lr_at(4 * BATCH) < LR > schedule.lr_at(6 * BATCH)
    whole = curve("linear", lr_warmup_iters=0, lr_warmup_fraction=0.1)
    assert whole.warmup_samples == pytest.approx(0.1 * TOTAL * BATCH)
