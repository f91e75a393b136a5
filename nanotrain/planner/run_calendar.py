"""From the time of a step to the day a run ends: failures, restarts, saves and spare hosts.

    Component       what fails, how often, and how long until the run notices
    RunConditions   all inputs, in seconds of the clock
    simulate        many runs with drawn failures: days, addends and failures of each
    goodput         the expected share of steps in the time of a long run, in closed form
    best_interval   the steps between saves with the highest goodput
    needed_spares   spare hosts with which a failed host is replaced at once

An attempt restarts, then trains in cycles of `save_interval` steps and one save:

    restart_s | steps save | steps save | steps X  detection | wait for a host | restart_s ...

Failures are a Poisson process while ranks run, restarts included; a failure loses the work since
the last save that was complete. While a run waits for its detection or for a host nothing fails.

Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps",
for failures during restarts and the best interval.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from nanotrain.errors import ConfigError

DAY_S = 86_400.0
NUM_TRIALS = 1000
SEED = 20_260_101
MIN_GOODPUT = 0.01  # with less a run takes a hundred times its steps: it is refused
SPARES_SUFFICE = 0.99  # share of host failures for which `needed_spares` has a host ready
MAX_SPARES = 100_000


@dataclass(frozen=True)
class Component:
    """A kind of failure."""

    name: str
    per_1000_gpu_days: float  # failures
    detect_s: float  # from the failure to the end of all ranks
    takes_host: bool  # whether its host has to be replaced


@dataclass(frozen=True)
class RunConditions:
    """The conditions from which the end of a run follows."""

    step_s: float  # seconds of a step
    num_steps: int
    num_gpus: int
    gpus_per_host: int
    components: Sequence[Component]
    restart_s: float  # from the end of all ranks to the next step
    save_interval: int  # steps
    save_stall_s: float  # for which a save blocks steps
    save_lag_s: float = 0.0  # from the end of the stall until the save is complete
    straggler_slowdown: float = 0.0  # longer steps, as a share of a step
    evaluation_share: float = 0.0  # evaluation, as a share of the time of steps
    spare_hosts: int = 0
    repair_s: float = 0.0  # until a failed host can be used again

    @property
    def work_s(self) -> float:
        """Seconds of all steps, without anything else."""
        return self.step_s * self.num_steps

    @property
    def slowdown_factor(self) -> float:
        """Seconds of training per second of steps: stragglers and evaluation are part of it."""
        return 1 + self.straggler_slowdown + self.evaluation_share

    @property
    def rates(self) -> np.ndarray:
        """[components] failures per second of the whole run."""
        per_day = [component.per_1000_gpu_days for component in self.components]
        return np.array(per_day) * self.num_gpus / 1000 / DAY_S

    @property
    def between_failures_s(self) -> float:
        """Mean seconds between failures; infinite without any."""
        rate = float(self.rates.sum())
        return 1 / rate if rate else math.inf

    @property
    def interval_s(self) -> float:
        """Seconds of steps from save to save; of the whole run where it saves only at the end."""
        return min(self.save_interval or self.num_steps, self.num_steps) * self.step_s

    @property
    def cycle_s(self) -> float:
        """Seconds from save to save."""
        return self.interval_s * self.slowdown_factor + self.save_stall_s


@dataclass(frozen=True)
class Addends:
    """[runs] seconds of each run by cause; they add up to the time of the run."""

    steps: np.ndarray
    stragglers: np.ndarray
    evaluation: np.ndarray
    saves: np.ndarray
    lost_work: np.ndarray  # steps, saves and evaluation that are repeated
    detection: np.ndarray
    restarts: np.ndarray
    spare_waits: np.ndarray

    def means(self) -> dict[str, float]:
        """The mean seconds of each cause."""
        return {name: float(values.mean()) for name, values in vars(self).items()}

    def total(self) -> np.ndarray:
        """[runs] seconds from the first start to the last step."""
        return np.sum(list(vars(self).values()), axis=0)


@dataclass(frozen=True)
class SimulatedRuns:
    """The outcome of `simulate`."""

    addends: Addends
    failures: Mapping[str, float]  # mean number of each component in a run

    @property
    def seconds(self) -> np.ndarray:
        """[runs] seconds from the first start to the last step."""
        return self.addends.total()

    @property
    def median_s(self) -> float:
        """The median of the seconds."""
        return float(np.median(self.seconds))

    @property
    def late_s(self) -> float:
        """The seconds that nine of ten runs do not exceed."""
        return float(np.quantile(self.seconds, 0.9))

    @property
    def goodput(self) -> float:
        """Seconds of steps as a share of all seconds."""
        return float(self.addends.steps.mean() / self.seconds.mean())


def goodput(run: RunConditions) -> float:
    """The expected share of steps in a run that is long beside the time between failures.

    An attempt lasts M + D seconds on average: M between failures, D of detection. It saves k
    intervals where it lasts for the restart R, k cycles c and the lag w of the last save, so
    exp(-(R + w) / M) / (exp(c / M) - 1) intervals on average. Waits for spare hosts are left out.
    """
    between = run.between_failures_s
    if math.isinf(between):
        return run.interval_s / run.cycle_s
    exponent = run.cycle_s / between
    if exponent > 700:
        return 0.0
    saved = math.exp(-(run.restart_s + run.save_lag_s) / between) / math.expm1(exponent)
    return saved * run.interval_s / (between + _mean_detection_s(run))


def _mean_detection_s(run: RunConditions) -> float:
    detections = np.array([component.detect_s for component in run.components])
    return float((run.rates * detections).sum() / run.rates.sum())


def best_interval(run: RunConditions) -> int:
    """The steps between saves with the highest goodput, in closed form.

    The derivative of `goodput` is zero where exp(c / M) (1 - t / M) = 1, for a training time t of
    an interval and a cycle c = t + stall. An interval is at least as long as a save takes.
    """
    between = run.between_failures_s
    step_s = run.step_s * run.slowdown_factor
    longest = float(run.num_steps)
    if math.isinf(between):
        return int(longest)
    low = 0.0
    high = between  # there the product is 0
    for _ in range(100):
        middle = (low + high) / 2
        exponent = min(700.0, (middle + run.save_stall_s) / between)
        if math.exp(exponent) * (1 - middle / between) > 1:
            low = middle
        else:
            high = middle
    shortest = math.ceil((run.save_stall_s + run.save_lag_s) / step_s)
    return int(max(1.0, min(longest, max(shortest, round(low / step_s)))))


def needed_spares(run: RunConditions) -> int:
    """The fewest spare hosts with which 99 % of host failures find a host ready.

    The number of hosts in repair is Poisson distributed, with failures per second times `repair_s`
    as its mean, while the run replaces each at once.

    Raises:
        ConfigError: more than `MAX_SPARES` hosts would be in repair at once.
    """
    takes_host = np.array([item.takes_host for item in run.components], dtype=bool)
    mean = float(run.rates[takes_host].sum()) * run.repair_s
    share = 0.0
    for spares in range(MAX_SPARES):
        share += math.exp(spares * math.log(mean) - mean - math.lgamma(spares + 1)) if mean else 1
        if share >= SPARES_SUFFICE:
            return spares + 1 if mean else 0
    raise ConfigError(
        f"more than {MAX_SPARES:,} hosts would be in repair at once",
        why=f"{mean:.3g} hosts fail in the {run.repair_s / 3600:,.0f} hours of a repair",
        fix="lower --repair-hours, --gpu-failures or --host-failures",
    )


def require_end(run: RunConditions) -> None:
    """Check that a run makes progress.

    Raises:
        ConfigError: it loses nearly all of its work.
    """
    share = goodput(run)
    if share >= MIN_GOODPUT:
        return
    fixes = ["a shorter --restart-s", "a shorter --save-stall-s", "fewer failures"]
    best = best_interval(run)
    if goodput(replace(run, save_interval=best)) >= MIN_GOODPUT:
        fixes = [f"--save-interval {best}"]
    raise ConfigError(
        f"a run of {run.num_gpus:,} GPUs would spend {share:.2%} of its time on steps",
        why=f"a failure comes every {run.between_failures_s / 60:,.1f} minutes, a restart takes "
        f"{run.restart_s / 60:,.1f} and a save follows after {run.cycle_s / 60:,.1f}",
        fix=" or ".join(fixes),
    )


def simulate(
    run: RunConditions, *, num_trials: int = NUM_TRIALS, seed: int = SEED
) -> SimulatedRuns:
    """Draw the failures of many runs.

    Args:
        run: conditions of a run.
        num_trials: number of runs.
        seed: seed of the draws; the same seed gives the same runs.

    Raises:
        ConfigError: the run makes no progress.
    """
    require_end(run)
    trials = _Trials(run, num_trials, np.random.default_rng(seed))
    while trials.run_attempt():
        pass
    return trials.outcome()


@dataclass
class _Trials:
    """The state of all simulated runs, one element each."""

    run: RunConditions
    num_trials: int
    rng: np.random.Generator
    saved: np.ndarray = field(init=False)  # complete intervals
    num_intervals: int = field(init=False)  # of a whole run; the last one may be shorter

    def __post_init__(self) -> None:
        run = self.run
        zeros = np.zeros(self.num_trials)
        self.saved = zeros.copy()
        self.num_intervals = math.ceil(run.work_s / run.interval_s - 1e-9)
        self.is_active = np.ones(self.num_trials, dtype=bool)
        self.lost_work = zeros.copy()
        self.detection = zeros.copy()
        self.restarts = zeros.copy()
        self.spare_waits = zeros.copy()
        self.counts = np.zeros((self.num_trials, len(run.components)))
        # [runs, hosts] when each spare host can be used, in seconds of the run
        self.ready_at = np.zeros((self.num_trials, run.spare_hosts))
        self.clock = zeros.copy()

    def run_attempt(self) -> bool:
        """Let every run go on until it fails or ends; returns whether one goes on."""
        active = np.flatnonzero(self.is_active)
        if not len(active):
            return False
        run = self.run
        until_failure_s = np.full(len(active), math.inf)
        if not math.isinf(run.between_failures_s):
            until_failure_s = self.rng.exponential(run.between_failures_s, len(active))
        self.restarts[active] += np.minimum(until_failure_s, run.restart_s)
        trained_s = np.maximum(0.0, until_failure_s - run.restart_s)
        left_s = self._seconds_left(active)
        has_ended = trained_s >= left_s
        num_saves = np.floor(np.maximum(0.0, trained_s - run.save_lag_s) / run.cycle_s)
        num_saves = np.minimum(num_saves, self.num_intervals - 1 - self.saved[active])
        self.saved[active] += np.where(has_ended, 0.0, num_saves)
        lost_s = np.where(has_ended, 0.0, trained_s - num_saves * run.cycle_s)
        self.lost_work[active] += lost_s
        self.clock[active] += np.minimum(until_failure_s, run.restart_s + left_s)
        self.is_active[active[has_ended]] = False
        self._fail(active[~has_ended])
        return True

    def _seconds_left(self, active: np.ndarray) -> np.ndarray:
        """Seconds of training from the newest save of runs to their last save."""
        run = self.run
        intervals = self.num_intervals - self.saved[active]
        work = run.work_s - self.saved[active] * run.interval_s
        return work * run.slowdown_factor + intervals * run.save_stall_s + run.save_lag_s

    def _fail(self, failed: np.ndarray) -> None:
        """Draw the failed component of each run, and add the time until a restart can begin."""
        if not len(failed):
            return
        components = self.run.components
        shares = self.run.rates / self.run.rates.sum()
        drawn = self.rng.choice(len(components), size=len(failed), p=shares)
        self.counts[failed, drawn] += 1
        seconds = np.array([component.detect_s for component in components])[drawn]
        self.detection[failed] += seconds
        self.clock[failed] += seconds
        takes_host = np.array([component.takes_host for component in components])[drawn]
        self._replace_hosts(failed[takes_host])

    def _replace_hosts(self, failed: np.ndarray) -> None:
        """Take a spare host for each failed one, which is a spare once it is repaired."""
        run = self.run
        waits = np.full(len(failed), run.repair_s)
        if run.spare_hosts:
            taken = self.ready_at[failed].argmin(axis=1)
            waits = np.maximum(0.0, self.ready_at[failed, taken] - self.clock[failed])
            self.ready_at[failed, taken] = self.clock[failed] + run.repair_s
        self.spare_waits[failed] += waits
        self.clock[failed] += waits

    def outcome(self) -> SimulatedRuns:
        """The addends of all runs, which have ended."""
        run = self.run
        ones = np.ones(self.num_trials)
        addends = Addends(
            steps=run.work_s * ones,
            stragglers=run.work_s * run.straggler_slowdown * ones,
            evaluation=run.work_s * run.evaluation_share * ones,
            saves=(self.num_intervals * run.save_stall_s + run.save_lag_s) * ones,
            lost_work=self.lost_work,
            detection=self.detection,
            restarts=self.restarts,
            spare_waits=self.spare_waits,
        )
        return SimulatedRuns(addends, dict(self._failures()))

    def _failures(self) -> Iterator[tuple[str, float]]:
        means = self.counts.mean(axis=0)
        for component, mean in zip(self.run.components, means, strict=True):
            yield component.name, float(mean)
