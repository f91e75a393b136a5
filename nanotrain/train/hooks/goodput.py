"""Goodput: the seconds of steps that count, as a share of the time since the run first started.

    goodput      0 to 1; a step counts once, and a skipped one never
    lost_steps   steps that were trained and then repeated, after a restart or a rollback
    restarts     starts of the run after the first one; a relayout of a running job is none

The rest is restarts and pauses between them, repeated and skipped steps, saves and validation. The
numbers come from the run folder, so a run that is started again goes on with them.

Source: Kokolis et al. 2024, "Revisiting Reliability in Large-Scale Machine Learning Research
Clusters": effective training time ratio.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanotrain.train.hooks.hook import Hook
from nanotrain.train.run import Run
from nanotrain.train.step_report import StepReport
from nanotrain.untrusted import read_rows

SUPERSEDED = "metrics-superseded.jsonl"


@dataclass
class RunTimes:
    """Times and restarts of a run, from its folder."""

    steps_s: float = 0.0  # of steps that count
    lost_steps: int = 0
    restarts: int = 0  # starts before this one; a relayout of a running job is none
    first_start_s: float | None = None  # seconds since the epoch; None before the first start

    @classmethod
    def read(cls, folder: Path, *, step: int) -> "RunTimes":
        """Read the folder of a run that goes on from a step; later rows are lost steps."""
        times = cls(lost_steps=_count(read_rows(folder / SUPERSEDED)))
        for row in read_rows(folder / "metrics.jsonl"):
            number = row.get("step")
            if not isinstance(number, int) or number > step:
                times.lost_steps += 1
            elif not row.get("skipped"):
                times.steps_s += _seconds_of(row)
        starts = list(read_rows(folder / "starts.jsonl"))
        known = [start_s for row in starts if (start_s := _number_of(row.get("time_s")))]
        if known:
            times.first_start_s = min(known)
        times.restarts = sum(row.get("in_place") is not True for row in starts)
        return times


class GoodputHook(Hook):
    """Sets the goodput of every report on the first rank; called before the log.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._opened_s = clock()
        self._times: RunTimes | None = None

    def before_training(self, run: Run) -> None:
        """Read the times of earlier starts from the run folder."""
        if not run.context.control.is_first:
            return
        self._times = RunTimes.read(run.folder.path, step=run.state.step)
        if run.inputs.begins_phase:  # these processes have their start in the folder
            self._times.restarts -= 1

    def after_rollback(self, run: Run, report: StepReport) -> None:
        """Count the steps that are repeated, the one with the spike among them."""
        if self._times is None:
            return
        restarts = self._times.restarts
        self._times = RunTimes.read(run.folder.path, step=run.state.step)
        self._times.lost_steps += 1  # its row is written after this
        self._times.restarts = restarts

    def after_read(self, run: Run, report: StepReport) -> None:
        """Count the step, and set the goodput of its report."""
        if self._times is None:
            return
        times = self._times
        if not report.output.skipped:
            times.steps_s += report.step_time_s
        start_s = self._opened_s
        if times.first_start_s is not None:
            start_s = min(start_s, times.first_start_s)
        elapsed_s = self._clock() - start_s
        # a first step that began before this hook was opened
        report.goodput = times.steps_s / max(elapsed_s, times.steps_s)
        report.lost_steps = times.lost_steps
        report.restarts = times.restarts


def _count(rows: Iterable[Any]) -> int:
    return sum(1 for _ in rows)


def _seconds_of(row: dict[str, Any]) -> float:
    return _number_of(row.get("step_time_s"))


def _number_of(value: object) -> float:
    """A number of a row that a crash or a user may have changed; else 0."""
    if isinstance(value, int | float) and 0 <= value < 1e18:
        return float(value)
    return 0.0
