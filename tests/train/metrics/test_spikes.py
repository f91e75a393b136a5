"""Deviations and spikes by their definition, over a window that moves."""

import math

import numpy as np
import pytest

from nanotrain.train.metrics.spikes import MIN_STEPS, WINDOW, SpikeScore
from tests.train.small_run import report_of


def test_deviations_and_spikes_are_those_by_hand():
    draw = np.random.default_rng(0)
    losses = list(3 + 0.1 * draw.standard_normal(WINDOW + 200))
    losses[WINDOW + 150] = 5.0
    score = SpikeScore()
    found = [score.add(loss) for loss in losses]
    assert found[:MIN_STEPS] == [None] * MIN_STEPS and found[MIN_STEPS] is not None
    for step in (MIN_STEPS, 300, WINDOW + 100, WINDOW + 150):
        window = losses[max(0, step - WINDOW) : step]
        assert found[step][0] == pytest.approx((losses[step] - np.mean(window)) / np.std(window), rel=1e-9)
    assert found[WINDOW + 149][1] == 0.0
    assert found[WINDOW + 150][0] > 7 and found[-1][1] == 1 / (len(losses) - MIN_STEPS)


def test_a_loss_that_is_not_finite_is_a_spike_and_changes_no_window():
    score = SpikeScore()
    for loss in [2.0, 3.0] * MIN_STEPS:
        score.add(loss)
    assert score.add(math.nan)[0] == math.inf and score.add(3.0)[0] == 1.0


def test_a_row_has_both_after_the_first_steps_however_often_it_is_read():
    spikes = SpikeScore()
    reports = [report_of(step, loss=2.0 + step % 2, spikes=spikes) for step in range(1, MIN_STEPS + 3)]
    rows = [report.to_json() for report in reports]
    assert [report.to_json() for report in reports] == rows
    assert "spike_score" not in rows[MIN_STEPS - 1] and rows[-1]["spike_score"] == 0.0
    assert abs(rows[-1]["loss_deviation"]) == pytest.approx(1.0, abs=0.1)
