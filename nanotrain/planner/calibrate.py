"""Calibration: factors on the times of operators and collectives, from finished runs of a machine.

    measured      step time and exposed communication of data parallelism of a run, from its metrics
    calibrate     the factors with which the planner predicts the measured times
    calibrated    a scenario, of any layout, on the machine as it was measured

A run without `--timing-log-level` has one number, the time of a step: it scales operators. Timers
or further runs measure collectives separately.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from nanotrain.config.load import load
from nanotrain.errors import ConfigError
from nanotrain.planner.engine import Engine
from nanotrain.planner.hardware import GPU, Calibration
from nanotrain.planner.scenario import Scenario, scenario_of
from nanotrain.planner.step_time import StepTime, predict_step
from nanotrain.untrusted import read_rows

FIRST_STEPS = 3  # steps which allocate, compile and fill caches
MIN_STEPS = 3  # steps that a median needs
# the search for the logarithms of the factors
ROUNDS = 20
TOLERANCE = 1e-4
LARGEST = math.log(100.0)
# share of exposed communication in a step below which collectives cannot be calibrated
FAINT = 0.02
WAITS = ("grad-reduce", "param-gather")  # timers of exposed communication of data parallelism


@dataclass(frozen=True)
class Measured:
    """A run that was measured."""

    scenario: Scenario  # that run
    step_s: float  # median of its steady steps
    exposed_dp_s: float = 0.0  # waiting for reductions and gathers in a step; 0 without timers

    def errors(self, calibration: Calibration) -> list[float]:
        """Logarithms of predicted over measured times.

        The times are the step time and, with timers, the time without waiting for dp.
        """
        time = predict_step(calibrated(self.scenario, calibration))
        errors = [math.log(time.total / self.step_s)]
        if self.exposed_dp_s:
            predicted_s = time.total - time.exposed.get("dp", 0.0)
            errors.append(math.log(predicted_s / (self.step_s - self.exposed_dp_s)))
        return errors


def measured(folder: Path, *, gpu: GPU, engine: Engine | str = "nanotrain") -> Measured:
    """Read configuration, ranks and steady steps of a run folder, without validation and saves.

    Raises:
        ConfigError: there is no run, or it has too few steps.
    """
    rows = [row for row in read_rows(folder / "metrics.jsonl") if row.get("step_time_s")]
    steady = rows[FIRST_STEPS:]
    starts = list(read_rows(folder / "starts.jsonl"))
    if len(steady) < MIN_STEPS or not starts:
        what = f"{folder} has {len(steady)} steady steps"
        if not steady:
            what = f"{folder} has no measured steps"
        median_of = f"a calibration takes the median of at least {MIN_STEPS}"
        files = "metrics.jsonl, config.yaml and starts.jsonl"
        raise ConfigError(
            what,
            why=f"{median_of}, after the first {FIRST_STEPS} of a run",
            fix=f"name the folder of a run of nanotrain, with its {files}",
        )
    config = load([f"+config={folder / 'config.yaml'}"], to_train=False).config
    scenario = scenario_of(config, int(starts[-1]["world_size"]), gpu=gpu, engine=engine)
    waits = []
    for row in steady:
        timers = row.get("timers")
        if timers:
            waits.append(sum(timers.get(name, 0.0) for name in WAITS))
    return Measured(
        scenario,
        step_s=median(row["step_time_s"] for row in steady),
        exposed_dp_s=median(waits) if waits else 0.0,
    )


def calibrated(scenario: Scenario, calibration: Calibration) -> Scenario:
    """The scenario on the machine that was measured."""
    return replace(scenario, gpu=replace(scenario.gpu, calibration=calibration))


def calibrate(runs: Sequence[Measured]) -> Calibration:
    """The factors that predict the runs best, by Gauss-Newton on the logarithms of times.

    Raises:
        ConfigError: no factors lead to the step time of a single run.
    """
    times = [predict_step(run.scenario) for run in runs]
    logs = np.zeros(2 if _tells_collectives_apart(runs, times) else 1)
    for _ in range(ROUNDS):
        now = _errors(runs, logs)
        slopes = []
        for unit in np.eye(len(logs)):
            slopes.append((_errors(runs, logs + 0.01 * unit) - now) / 0.01)
        step = -np.linalg.lstsq(np.stack(slopes, axis=1), now, rcond=1e-3)[0]
        logs = np.clip(logs + np.clip(step, -1.0, 1.0), -LARGEST, LARGEST)
        if np.abs(step).max() < TOLERANCE:
            break
    if len(runs) == 1 and abs(_errors(runs, logs)[0]) > 0.03:
        communication_s = sum(times[0].exposed.values())
        raise ConfigError(
            f"no speed of this machine gives a step of {runs[0].step_s:.3f} s",
            why=f"communication alone is predicted to take {communication_s:.3f} s of it",
            fix="name the GPU of the run by --gpu, or calibrate on a run with fewer ranks too",
        )
    return _calibration(logs)


def _tells_collectives_apart(runs: Sequence[Measured], times: Sequence[StepTime]) -> bool:
    """Whether the runs determine a factor of collectives too."""
    communicates = any(sum(time.exposed.values()) > FAINT * time.total for time in times)
    has_timers = any(run.exposed_dp_s > FAINT * run.step_s for run in runs)
    return communicates and (len(runs) > 1 or has_timers)


def _calibration(logs: np.ndarray) -> Calibration:
    """Factors from one or two logarithms: of operators, and of collectives if it is given."""
    return Calibration(*(float(factor) for factor in np.exp(logs)))


def _errors(runs: Sequence[Measured], logs: np.ndarray) -> np.ndarray:
    """Logarithmic errors of all runs."""
    calibration = _calibration(logs)
    errors: list[float] = []
    for run in runs:
        errors += run.errors(calibration)
    return np.array(errors)
