"""The figures are valid plotly and show the metrics of the runs."""

from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.report import figures
from nanotrain.report.figures import keep_extremes, smooth
from nanotrain.report.history import RunHistory
from tests.report.runs import expert_load, write_run


@pytest.fixture
def runs(tmp_path: Path) -> list[RunHistory]:
    valid = lambda step: 3.0 if step % 10 == 0 else None  # noqa: E731
    first = write_run(tmp_path / "first", moe=expert_load, valid_loss=valid, stall_s=lambda step: step / 7)
    return [RunHistory.read(first), RunHistory.read(write_run(tmp_path / "second", steps=5000, mfu=lambda _: 0.4))]


def test_every_figure_is_valid_plotly(runs: list[RunHistory]) -> None:
    drawn = [figures.loss_figure(runs), *figures.step_figures(runs), *figures.expert_figures(runs[0])]
    memory = figures.memory_figure(runs)
    assert memory is not None
    for figure in [*drawn, memory]:
        go.Figure(figure)  # raises on an unknown property


def test_the_loss_has_raw_smoothed_and_validation_lines_on_three_axes(runs: list[RunHistory]) -> None:
    figure = figures.loss_figure(runs)
    names = [trace["name"] for trace in figure["data"]]
    assert names == ["first", "first smoothed", "first validation", "second", "second smoothed"]
    assert figure["data"][2]["x"] == [10, 20, 30, 40]
    tokens, hours = (figure["layout"]["updatemenus"][0]["buttons"][i]["args"][0]["x"] for i in (1, 2))
    assert tokens[2] == [640, 1280, 1920, 2560] and hours[2] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert len(tokens) == len(names)
    assert all(len(trace["y"]) <= figures.MAX_POINTS for trace in figure["data"])


def test_the_smoothed_loss_does_not_lag_and_is_equal_for_equal_runs(tmp_path: Path) -> None:
    runs = [
        RunHistory.read(write_run(tmp_path / str(steps), steps=steps, loss=lambda step: 8.0 - 0.1 * step))
        for steps in (40, 20)
    ]
    _, longer, _, shorter = figures.loss_figure(runs)["data"]
    assert 4.0 < longer["y"][-1] < 4.4
    assert longer["y"][:20] == shorter["y"]


def test_idle_charts_are_left_out_and_unknown_metrics_are_drawn(runs: list[RunHistory]) -> None:
    titles = [figure["layout"]["title"]["text"] for figure in figures.step_figures(runs)]
    assert "learning rate" in titles and "model FLOPs utilization, %" in titles and "stall s" in titles
    assert "skipped steps" not in titles and "loss scale" not in titles


def test_expert_heat_maps_are_relative_to_the_mean(runs: list[RunHistory]) -> None:
    over_time, per_router = figures.expert_figures(runs[0])
    # layers.0 gives shares of 1/6, 2/6, 3/6; layers.1 gives everything to the first of three experts.
    assert [row[0] for row in over_time["data"][0]["z"]] == pytest.approx([1.75, 0.5, 0.75])
    assert per_router["data"][0]["z"][1] == [3, 0, 0] and per_router["data"][0]["y"] == ["layers.0", "layers.1"]
    assert figures.expert_figures(runs[1]) == []


def test_memory_is_a_bar_per_run_with_a_plan(runs: list[RunHistory]) -> None:
    figure = figures.memory_figure(runs)
    assert figure is not None
    assert [(bar["name"], bar["x"]) for bar in figure["data"][:2]] == [("params", [1, 1]), ("grads", [2, 2])]


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
