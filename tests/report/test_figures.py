"""The figures are valid plotly and show the metrics of the runs."""

from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.report import figures
from nanotrain.report.figures import CHARTS, bin_means, keep_extremes
from nanotrain.report.history import RunHistory
from tests.report.runs import expert_load, write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunHistory]:
    folder = tmp_path_factory.mktemp("runs")
    valid = lambda step: 3.0 if step % 10 == 0 else None  # noqa: E731
    first = write_run(
        folder / "first", moe=expert_load, valid_loss=valid, stall_s=lambda step: step / 7
    )
    return [
        RunHistory.read(first),
        RunHistory.read(write_run(folder / "second", steps=2000, mfu=lambda _: 0.4)),
    ]


def by_title(runs: list[RunHistory]) -> dict[str, figures.Figure]:
    drawn = [figure for section in figures.step_figures(runs).values() for figure in section]
    return {figure["layout"]["meta"]["title"]: figure for figure in drawn}


def test_every_figure_is_valid_plotly_and_has_a_title_and_a_unit(runs: list[RunHistory]) -> None:
    memory = figures.memory_figure(runs)
    assert memory is not None
    for figure in [*by_title(runs).values(), *figures.expert_figures(runs[0]), memory]:
        go.Figure(figure)  # raises on an unknown property
        assert figure["layout"]["meta"]["title"] and figure["layout"]["meta"]["unit"]
    assert all(
        chart.title and chart.unit and chart.idle in figures.IDLE
        for each in CHARTS.values()
        for chart in each
    )


def test_charts_come_in_the_order_in_which_people_look_at_them(runs: list[RunHistory]) -> None:
    first = [
        "Training loss",
        "Validation loss",
        "Throughput",
        "Model FLOPs utilization (MFU)",
        "Learning rate",
    ]
    assert list(by_title(runs))[:7] == [
        *first,
        "Gradient norm before clipping",
        "Peak memory of rank 0",
    ]


def test_the_loss_has_a_line_per_run_with_means_to_smooth_and_validation_as_markers(
    runs: list[RunHistory],
) -> None:
    figure = by_title(runs)["Training loss"]
    assert [trace["name"] for trace in figure["data"]] == ["first", "second", "first validation"]
    first, second, valid = figure["data"]
    assert (
        valid["x"] == [10, 20, 30, 40]
        and valid["mode"] == "markers"
        and valid["meta"]["means"] is None
    )
    assert (
        len(second["y"]) <= figures.MAX_POINTS
        and 300 < len(second["meta"]["means"][0]) <= figures.MAX_MEANS
    )
    axes = figures.axes_of(runs[0])
    assert axes["tokens"][9::10] == [640, 1280, 1920, 2560] and axes["hours"][-1] == pytest.approx(
        0.4
    )


def test_evaluations_have_a_line_per_name(tmp_path: Path) -> None:
    def evaluation(step: int) -> dict[str, float]:
        sets = {
            f"valid/{name}/{kind}": 2.0
            for name in ("web", "math")
            for kind in ("loss", "bits_per_byte")
        }
        return sets | {"task/next-line/accuracy": step / 80, "task/next-line/questions": 64}

    folders = [
        write_run(tmp_path / name, evaluation=evaluation, valid_loss=lambda _: 2.5) for name in "ab"
    ]
    one, two = ([RunHistory.read(folder) for folder in some] for some in (folders[:1], folders))
    names = {
        title: [trace["name"] for trace in figure["data"]]
        for title, figure in by_title(one).items()
    }
    assert names["Validation loss"] == ["all", "web", "math"]
    assert (
        names["Tasks: right answers"] == ["next-line"]
        and by_title(one)["Tasks: right answers"]["data"][0]["y"][-1] == 50
    )
    assert "Tasks: size" not in names, "it never changes"
    assert [trace["name"] for trace in by_title(two)["Tasks: right answers"]["data"]] == [
        "a next-line",
        "b next-line",
    ]


@pytest.mark.parametrize(("world_size", "is_drawn"), [(3, False), (4, True)])
def test_the_slowest_rank_means_something_from_four_ranks_on(
    tmp_path: Path, world_size: int, is_drawn: bool
) -> None:
    folder = write_run(
        tmp_path / "a", slowest_rank=lambda step: step % 2, wait_for_slowest=lambda _: 0.1
    )
    environment = (folder / "environment.json").read_text()
    (folder / "environment.json").write_text(
        environment.replace('"world_size": 4', f'"world_size": {world_size}')
    )
    titles = by_title([RunHistory.read(folder)])
    assert ("Slowest rank" in titles, "Wait for the slowest rank" in titles) == (is_drawn, is_drawn)


def test_idle_charts_are_left_out_and_other_metrics_are_drawn_by_group(tmp_path: Path) -> None:
    more = {"stall_s": lambda step: step / 7, "phases": lambda step: {"a": step, "b": 1.0}}
    titles = by_title([RunHistory.read(write_run(tmp_path / "a", **more))])
    assert titles["Stall s"]["layout"]["meta"]["unit"] == "s"
    assert [trace["name"] for trace in titles["Phases"]["data"]] == ["a", "b"]
    assert not {"Skipped steps", "Loss scale", "Model FLOPs utilization (MFU)"} & set(titles)


def test_expert_heat_maps_are_relative_to_the_mean(runs: list[RunHistory]) -> None:
    over_time, per_router = figures.expert_figures(runs[0])
    # layers.0 gives shares of 1/6, 2/6, 3/6; layers.1 gives everything to the first of three
    # experts.
    assert [row[0] for row in over_time["data"][0]["z"]] == pytest.approx([1.75, 0.5, 0.75])
    assert per_router["data"][0]["z"][1] == [3, 0, 0] and per_router["data"][0]["y"] == [
        "layers.0",
        "layers.1",
    ]
    assert figures.expert_figures(runs[1]) == []


def test_memory_is_a_bar_per_run_with_a_plan(runs: list[RunHistory]) -> None:
    figure = figures.memory_figure(runs)
    assert figure is not None
    assert [(bar["name"], bar["x"]) for bar in figure["data"][:2]] == [
        ("params", [1, 1]),
        ("grads", [2, 2]),
    ]


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


def test_means_of_bins_pass_over_gaps() -> None:
    steps, values = np.arange(1000.0), np.tile([1.0, np.nan, 3.0, 4.0], 250)
    x, y = bin_means(steps, values)
    assert 300 < len(x) == len(y) <= figures.MAX_MEANS and np.isfinite(y).all()
    assert np.average(y) == pytest.approx(np.nanmean(values), rel=0.02) and (np.diff(x) > 0).all()


def test_means_at_the_beginning_are_those_of_few_steps() -> None:
    steps = np.arange(1.0, 100_001)
    x, y = bin_means(steps, 2 + 6 * steps**-0.3)
    assert np.abs(y / (2 + 6 * x**-0.3) - 1).max() < 0.02


def test_error_bars_of_tasks_are_standard_errors(tmp_path: Path) -> None:
    scores = {"task/next/accuracy": 0.2, "task/next/questions": 400}
    folder = write_run(tmp_path / "a", evaluation=lambda _: scores)
    chart = by_title([RunHistory.read(folder)])["Tasks: right answers"]
    (line,) = chart["data"]
    assert line["y"][0] == 20.0
    assert line["error_y"]["array"][0] == pytest.approx(2.0)  # 100 * sqrt(0.2 * 0.8 / 400)


def test_zeros_and_one_point_are_no_charts_of_an_ended_run(tmp_path: Path) -> None:
    def only_last(step: int) -> float | None:
        return 3.0 if step == 40 else None

    metrics = {"zeros_s": lambda _: 0.0, "once_s": only_last, "valid_loss": only_last}
    ended = RunHistory.read(write_run(tmp_path / "ended", **metrics))
    assert ended.state() == "finished"
    titles = by_title([ended])
    assert not {"Zeros s", "Once s", "Validation loss"} & set(titles)
    names = [trace["name"] for trace in titles["Training loss"]["data"]]
    assert names == ["ended", "ended validation"]
    running = RunHistory.read(write_run(tmp_path / "running", steps=1, lr=lambda _: 0.1))
    assert running.state() == "running"
    assert "Learning rate" in by_title([running])


def test_every_run_has_the_bars_of_its_own_plan(tmp_path: Path) -> None:
    runs = []
    for number in (1, 2):
        run = RunHistory.read(write_run(tmp_path / str(number)))
        sizes = {part: number * 10**9 * (2 + row) for row, part in enumerate(figures.MEMORY_PARTS)}
        run.environment["memory"] = sizes
        runs.append(run)
    figure = figures.memory_figure(runs)
    assert figure is not None
    for row, bar in enumerate(figure["data"]):
        assert (bar["name"], bar["y"]) == (figures.MEMORY_PARTS[row], ["1", "2"])
        assert bar["x"] == [2.0 + row, 2 * (2.0 + row)]
