"""The times of the phases of a step, and their ranges in traces."""

import json

import pytest

from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.hooks.log import PHASES, LogHook
from nanotrain.train.hooks.profile import ProfileHook
from nanotrain.train.hooks.timers import TimersHook
from tests.train.small_run import Failing, metrics_of, small_run, train

STEP = {"data", "forward-backward", "grad-reduce", "optimizer", "param-gather"}


@pytest.mark.parametrize(("level", "more"), [("1", set()), ("2", {"F", "B"})])
def test_the_phases_of_every_step_are_timed(tmp_path, level, more):
    arguments = (
        "--train-iters",
        "3",
        "--save-interval",
        "2",
        "--global-batch-size",
        "2",
        "--timing-log-level",
        level,
    )
    with small_run(tmp_path, *arguments) as run:
        train(run, TimersHook(), LogHook(), CheckpointHook())
    first, second, third = metrics_of(tmp_path)
    assert set(first["timers"]) == STEP | more
    assert set(second["timers"]) == STEP | more | {"hooks"}
    assert set(third["timers"]) == STEP | more | {"hooks", "checkpoint"}, "the save after step 2"
    for row in (first, second, third):
        times = row["timers"]
        assert all(seconds > 0 for seconds in times.values())
        assert sum(times[name] for name in STEP) == pytest.approx(
            row["step_time_s"], rel=0.1, abs=0.01
        )
        assert sum(times[name] for name in more) <= times["forward-backward"]
    assert run.context.heartbeat.observer("after the run", 1) is None


def test_without_the_flag_a_profile_has_the_ranges_and_no_row_has_times(tmp_path):
    arguments = (
        "--train-iters",
        "2",
        "--profile",
        "--profile-step-start",
        "2",
        "--profile-step-end",
        "2",
    )
    with small_run(tmp_path, *arguments) as run:
        train(run, TimersHook(), LogHook(), ProfileHook())
    assert all("timers" not in row for row in metrics_of(tmp_path))
    (trace,) = (tmp_path / "profile").glob("*.json")
    events = [
        event
        for event in json.loads(trace.read_text())["traceEvents"]
        if event.get("cat") == "user_annotation"
    ]
    spans = {event["name"]: (event["ts"], event["ts"] + event["dur"]) for event in events}
    assert set(spans) >= STEP and not spans.keys() & {"hooks", "F", "B"}
    begin, end = spans["ProfilerStep#2"]
    assert all(begin <= spans[name][0] and spans[name][1] <= end for name in STEP - {"data"})


def test_an_error_leaves_no_range_open(tmp_path):
    hook = TimersHook()
    with (
        small_run(tmp_path, "--train-iters", "3", "--timing-log-level", "2") as run,
        pytest.raises(RuntimeError),
    ):
        train(run, hook, Failing(1))
    assert hook._open == [] and set(PHASES) >= STEP
