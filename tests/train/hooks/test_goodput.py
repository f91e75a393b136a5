"""Goodput in the rows of a run that is killed, started again and rolled back."""

import json
from dataclasses import replace

import pytest

from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.hooks.description import DescriptionHook, StartFacts
from nanotrain.train.hooks.goodput import GoodputHook, RunTimes
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.hooks.log import LogHook
from tests.train.small_run import Failing, metrics_of, small_run, train


class Clock:
    """Seconds since the epoch, as told."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def write_rows(path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_folder_has_the_time_of_steps_that_count_lost_steps_and_starts(tmp_path):
    rows = [{"step": step, "step_time_s": 2.0, "skipped": step == 3} for step in range(1, 8)]
    write_rows(tmp_path / "metrics.jsonl", [*rows, {"step": 4, "step_time_s": "soon"}])
    write_rows(tmp_path / "metrics-superseded.jsonl", [{"step": 3, "step_time_s": 9.0}] * 2)
    starts = [{"step": 0, "time_s": 50.0}, {"step": 2, "time_s": 70}]
    relayout = {"step": 3, "time_s": 80, "in_place": True}
    write_rows(tmp_path / "starts.jsonl", [*starts, relayout])
    times = RunTimes.read(tmp_path, step=5)
    assert times == RunTimes(steps_s=8.0, lost_steps=4, restarts=2, first_start_s=50.0)
    assert RunTimes.read(tmp_path / "new", step=0) == RunTimes()


def test_a_restart_counts_the_pause_and_the_steps_that_it_repeats(tmp_path):
    described = DescriptionHook(StartFacts("cpu", "one rank"))
    arguments = ("--train-iters", "6", "--save-interval", "2")
    with small_run(tmp_path, *arguments) as run, pytest.raises(RuntimeError):
        train(run, GoodputHook(), LogHook(), described, CheckpointHook(), Failing(5))
    before = metrics_of(tmp_path)
    assert [row["restarts"] for row in before] == [0] * 5
    assert all(0 < row["goodput"] <= 1 and row["lost_steps"] == 0 for row in before)
    start_s = json.loads((tmp_path / "starts.jsonl").read_text())["time_s"]

    with small_run(tmp_path, *arguments) as run:
        train(run, GoodputHook(Clock(start_s + 1000.0)), LogHook(), CheckpointHook())
    rows = metrics_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    steps_s = sum(row["step_time_s"] for row in rows)
    assert rows[-1]["goodput"] == pytest.approx(steps_s / 1000.0)
    assert (rows[-1]["restarts"], rows[-1]["lost_steps"]) == (1, 1)


def test_the_time_of_a_skipped_step_does_not_count(tmp_path):
    class SkipSecond(Hook):
        def after_step(self, run, report) -> None:
            if report.step == 2:
                report.output = replace(report.output, copy=Skipped())

    class Skipped:
        """Numbers of a step whose update was skipped, as they come from the device."""

        is_ready = True

        def read(self) -> list[float]:
            return [4.0, float("nan"), 1.0, 1.0, 0.0]

    clock = Clock(50.0)
    goodput = GoodputHook(clock)
    clock.now_s = 1050.0
    with small_run(tmp_path, "--train-iters", "3") as run:
        train(run, SkipSecond(), goodput, LogHook())
    rows = metrics_of(tmp_path)
    assert [row["skipped"] for row in rows] == [False, True, False]
    share = [row["goodput"] for row in rows]
    assert share[0] == share[1] < share[2]


def test_a_rollback_counts_the_steps_that_it_repeats(tmp_path, monkeypatch):
    from nanotrain.train import fit

    spikes = iter([False, False, True, False, False])

    def count(state, loss, *, factor) -> bool:
        state.recent_losses.append(loss)
        return next(spikes)

    monkeypatch.setattr(fit, "count_loss", count)
    arguments = ("--train-iters", "4", "--save-interval", "1", "--rollback-on-spike", "2")
    with small_run(tmp_path, *arguments) as run:
        train(run, GoodputHook(), LogHook(), CheckpointHook())
    lost = {row["step"]: row["lost_steps"] for row in metrics_of(tmp_path)}
    assert lost == {1: 0, 2: 0, 3: 1, 4: 1}
