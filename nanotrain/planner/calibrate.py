"""What finished runs say about a machine: factors on the times of its operators and of its
collectives.

    measured      step time and exposed communication of data parallelism of a run, from its metrics
    calibrate     the factors with which the planner predicts what runs measured
    calibrated    a scenario, of any layout, on the machine as it was measured

One run without `--timing-log-level` has one number, the time of a step: it scales what computes.
Its timers, or further runs, tell collectives apart.
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
from nanotrain.planner.step_time import predict_step
from nanotrain.untrusted import read_rows

# steps which allocate, compile and fill caches; steps that a median needs
FIRST_STEPS, MIN_STEPS = 3, 3
ROUNDS, TOLERANCE, LARGEST = 20, 1e-4, math.log(100.0)  # of the search for the factors
# share of exposed communication in a step below which the step says nothing about collectives
FAINT = 0.02
WAITS = ("grad-reduce", "param-gather")  # timers of exposed communication of data parallelism


@dataclass(frozen=True)
class Measured:
    """A run that was measured."""

    scenario: Scenario  # that run
    step_s: float  # median of its steady steps
    exposed_dp_s: float = 0.0  # waiting for reductions and gathers in a step; 0 without timers

    def errors(self, calibration: Calibration) -> list[float]:
        """Logarithm of predicted over measured step time; with timers also of the time that is no
        waiting for dp.
        """
        time = predict_step(calibrated(self.scenario, calibration))
        others = time.total - time.exposed.get("dp", 0.0), self.step_s - self.exposed_dp_s
        return [
            math.log(time.total / self.step_s),
            *([math.log(others[0] / others[1])] if self.exposed_dp_s else []),
        ]


def measured(folder: Path, *, gpu: GPU, engine: Engine | str = "nanotrain") -> Measured:
    """Read a run folder: its configuration, ranks and steady steps, in which validation and saves
    do not count.

    Raises:
        ConfigError: there is no run, or it has too few steps.
    """
    rows = [row for row in read_rows(folder / "metrics.jsonl") if row.get("step_time_s")][
        FIRST_STEPS:
    ]
    starts = list(read_rows(folder / "starts.jsonl"))
    if len(rows) < MIN_STEPS or not starts:
        raise ConfigError(
            f"{folder} has no measured steps"
            if not rows
            else f"{folder} has {len(rows)} steady steps",
            why=f"a calibration takes the median of at least {MIN_STEPS}, after the first {FIRST_STEPS} of a run",
            fix="name the folder of a run of nanotrain, with its metrics.jsonl, config.yaml and starts.jsonl",
        )
    config = load([f"+config={folder / 'config.yaml'}"], to_train=False).config
    scenario = scenario_of(config, int(starts[-1]["world_size"]), gpu=gpu, engine=engine)
    waits = [
        sum(row["timers"].get(name, 0.0) for name in WAITS) for row in rows if row.get("timers")
    ]
    return Measured(scenario, median(row["step_time_s"] for row in rows), median(waits or [0.0]))


def calibrated(scenario: Scenario, calibration: Calibration) -> Scenario:
    """The scenario on the machine that was measured."""
    return replace(scenario, gpu=replace(scenario.gpu, calibration=calibration))


def calibrate(runs: Sequence[Measured]) -> Calibration:
    """The factors that predict the runs best, by Gauss-Newton on the logarithms of times.

    Raises:
        ConfigError: no factors lead to the step time of a single run.
    """
    times = [predict_step(run.scenario) for run in runs]
    communicates = any(sum(time.exposed.values()) > FAINT * time.total for time in times)
    has_timers = any(run.exposed_dp_s > FAINT * run.step_s for run in runs)
    factors = np.zeros(2 if communicates and (len(runs) > 1 or has_timers) else 1)

    def errors(logs: np.ndarray) -> np.ndarray:
        return np.array(
            [error for run in runs for error in run.errors(Calibration(*map(float, np.exp(logs))))]
        )

    for _ in range(ROUNDS):
        now = errors(factors)
        slopes = np.stack(
            [(errors(factors + 0.01 * unit) - now) / 0.01 for unit in np.eye(len(factors))], axis=1
        )
        step = -np.linalg.lstsq(slopes, now, rcond=1e-3)[0]
        factors = np.clip(factors + np.clip(step, -1.0, 1.0), -LARGEST, LARGEST)
        if np.abs(step).max() < TOLERANCE:
            break
    if len(runs) == 1 and abs(errors(factors)[0]) > 0.03:
        raise ConfigError(
            f"no speed of this machine gives a step of {runs[0].step_s:.3f} s",
            why=f"communication alone is predicted to take {sum(times[0].exposed.values()):.3f} s of it",
            fix="name the GPU of the run by --gpu, or calibrate on a run with fewer ranks too",
        )
    return Calibration(*map(float, np.exp(factors)))
