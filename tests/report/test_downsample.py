"""Downsampling keeps every extreme, whatever the number of steps."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.report.downsample import keep_extremes, smooth

NUMBERS = st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(float("nan"))), max_size=300)


@given(NUMBERS, st.integers(4, 60))
def test_ends_and_extremes_are_kept_within_the_limit(numbers: list[float], limit: int) -> None:
    values = np.array(numbers, dtype=float)
    kept = keep_extremes(values, limit)
    assert len(kept) <= limit and (np.diff(kept) > 0).all()
    present = np.flatnonzero(np.isfinite(values))
    if len(present):
        assert kept[0] == present[0] and kept[-1] == present[-1]
        assert values[kept].max() == np.nanmax(values) and values[kept].min() == np.nanmin(values)
    else:
        assert len(kept) == 0


def test_a_spike_of_one_step_in_a_hundred_thousand_stays_at_its_step() -> None:
    values = np.zeros(100_000)
    values[[12_345, 77_777]] = 9.0, -9.0
    assert {12_345, 77_777} <= set(keep_extremes(values, 400).tolist())


def test_smoothing_follows_a_step_and_passes_over_gaps() -> None:
    values = np.array([0.0] * 200 + [float("nan")] + [1.0] * 200)
    out = smooth(values, 20)
    assert out[200] == out[199] == 0.0
    assert abs(out[220] - (1 - np.exp(-1))) < 0.02
    assert np.isnan(smooth(np.array([np.nan, 1.0]), 5)[0])
