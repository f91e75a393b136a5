"""`StepReport`: the numbers of a step for hooks, console and metrics.jsonl.

Throughput      tokens per second and MFU
SpikeScore      deviation of a loss from the previous ones
SlowestRank     the rank that the others wait for
UnreadReports   reports whose numbers are still on the device

On a GPU the numbers of a step are read at logged steps, or once they are on the host anyway
(`UnreadReports`): waiting for them earlier would leave the device without work.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from nanotrain.comm.device import Stopwatch, device_name
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.plan.plan import Plan
from nanotrain.spec.counts import flops_per_token, peak_flops
from nanotrain.train.step import StepOutput

FIELDS = (
    "step",
    "loss",
    "grad_norm",
    "lr",
    "step_time_s",
    "tokens_per_second",
    "mfu",
    "peak_memory_bytes",
    "global_batch_size",
    "consumed_samples",
    "consumed_tokens",
    "skipped",
    "data_wait_s",
    "loss_scale",
)
OUTPUT_FIELDS = ("loss", "grad_norm", "skipped", "loss_scale")  # fields of `StepOutput` among them
OPTIONAL = (
    "valid_loss",
    "valid_bits_per_byte",
    "evaluation",
    "decoupled_lr",
    "data_stage",
    "seq_length",
    "skipped_on",
    "loss_deviation",
    "spike_score",
    "save_stall_s",
    "failed_saves",
    "goodput",
    "lost_steps",
    "restarts",
    "slowest_rank",
    "wait_for_slowest",
    "busy_s",
    "timers",
)

WINDOW = 1000  # losses whose mean and deviation judge the next one
MIN_STEPS = 50  # losses before the first judgement
SPIKE = 7.0  # standard deviations


@dataclass(frozen=True)
class Throughput:
    """Rates of a run from step times."""

    tokens_per_sample: int  # masked tokens included
    flops_per_token: int  # forward and backward
    peak_flops: float | None  # per second, of all devices together; None if unknown

    @classmethod
    def of(cls, plan: Plan, context: ParallelContext, *, seq_length: int) -> "Throughput":
        """The rates of a planned run on this device, with sequences of `seq_length`."""
        precision = plan.config.precision
        # With fp8 a lower bound: attention, embedding, head and router are not in fp8 and counted
        # against its peak.
        peak = peak_flops(device_name(context.device), precision.products_dtype)
        return cls(
            tokens_per_sample=plan.config.data.seq_length,
            flops_per_token=flops_per_token(plan.shape, seq_length),
            peak_flops=peak * plan.topology.world_size if peak else None,
        )

    def tokens_per_second(self, num_samples: int, step_time_s: float) -> float:
        """Tokens of all ranks per second, in a step of `num_samples`."""
        return num_samples * self.tokens_per_sample / step_time_s

    def mfu(self, tokens_per_second: float) -> float | None:
        """Model FLOPs utilization: achieved FLOPs relative to the peak."""
        if not self.peak_flops:
            return None
        return tokens_per_second * self.flops_per_token / self.peak_flops


class Spike(NamedTuple):
    """Deviation of a loss from the previous ones."""

    deviation: float  # in standard deviations
    score: float  # share of the steps so far that were spikes


class SpikeScore:
    """The deviation of a loss from the previous ones, and the share of spikes in a run's steps.

        deviation      (loss - mean) / standard deviation of the last WINDOW losses, in standard
                       deviations
        spike score    share of the steps, after the first MIN_STEPS, that deviate by SPIKE or more

    Losses are added in order; the count starts at 0 in every process.

    Source: OLMo Team 2024, "2 OLMo 2 Furious", section 3.1: values at least seven standard
    deviations away from a rolling average of the last 1000.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._num_steps = 0
        self._num_spikes = 0

    def add(self, loss: float) -> Spike | None:
        """Add the loss of a step; None for the first steps.

        A loss that is not finite has an infinite deviation and does not enter later windows.
        """
        deviation = self._deviation(loss) if len(self._losses) >= MIN_STEPS else None
        if math.isfinite(loss):
            self._losses.append(loss)
        if deviation is None:
            return None
        self._num_steps += 1
        if abs(deviation) >= SPIKE:
            self._num_spikes += 1
        return Spike(deviation, self._num_spikes / self._num_steps)

    def _deviation(self, loss: float) -> float:
        """The distance of a loss from the window's mean, in standard deviations."""
        if not math.isfinite(loss):
            return math.inf
        window = np.fromiter(self._losses, dtype=float)
        distance = loss - float(window.mean())
        spread = float(window.std())
        if spread:
            return distance / spread
        return math.copysign(math.inf, distance) if distance else 0.0


@dataclass
class StepReport:
    """One line of metrics.jsonl; the evaluation hook sets `valid_loss`.

    The numbers of `output` and the times are read from the device when they are first used, which
    waits for the end of the step unless `is_ready`.
    """

    step: int
    output: StepOutput
    stopwatch: Stopwatch  # from the request of the batch to the end of the step
    data_wait_s: float  # part of it spent waiting for data
    throughput: Throughput
    lr: float
    # peak of this rank so far (allocated tensors on a GPU, the process on a CPU)
    peak_memory_bytes: int
    global_batch_size: int  # samples of this step
    consumed_samples: int
    consumed_tokens: int
    is_logged: bool = True  # whether the host may wait for this step
    # learning rate of the embedding and the output layer; None where it is `lr`
    decoupled_lr: float | None = None
    seq_length: int | None = None  # tokens per sequence; None without a schedule of lengths
    data_stage: str | None = None  # name of the stage of its data; None without data stages
    valid_loss: float | None = None  # set on steps that end with a validation
    valid_bits_per_byte: float | None = None  # the same in bits per byte; None if bytes are unknown
    # results of named validation sets and tasks: "valid/NAME/loss", "task/NAME/accuracy", ...
    evaluation: dict[str, float] | None = None
    # In the previous step: the rank that waited least for others, and how much longer the others
    # waited on average, as a share of the step time. None on one rank and on GPUs, where the host
    # does not wait.
    slowest_rank: int | None = None
    wait_for_slowest: float | None = None
    # with log_straggler: seconds of the previous step in which each rank did not wait for others
    busy_s: Sequence[float] | None = None
    # seconds for which saves blocked this rank since the last row; None without one
    save_stall_s: float | None = None
    spikes: SpikeScore | None = None  # losses of the run so far; reports are read in order
    # ranks on which steps since the last logged one were not finite; None if none was
    skipped_on: str | None = None
    # checkpoints of the run that could not be written so far; None if there are none
    failed_saves: int | None = None
    # since the run first started, on the first rank: the time of steps that count as a share of all
    # time, steps that were repeated, and starts after the first one (train/hooks/goodput.py)
    goodput: float | None = None
    lost_steps: int | None = None
    restarts: int | None = None
    # phases that have ended since the last report, as often as they ran; with --timing-log-level
    phases: Sequence[tuple[str, Stopwatch]] = ()

    @property
    def is_ready(self) -> bool:
        """Whether all numbers are on the host."""
        return self.output.is_ready and self.stopwatch.is_ready

    @cached_property
    def _spike(self) -> Spike | None:
        return None if self.spikes is None else self.spikes.add(self.output.loss)

    @property
    def loss_deviation(self) -> float | None:
        """Deviation of the loss from the losses before it; None for the first steps."""
        return None if self._spike is None else self._spike.deviation

    @property
    def spike_score(self) -> float | None:
        """Share of the steps of this process whose loss was a spike; None for the first steps."""
        return None if self._spike is None else self._spike.score

    @cached_property
    def step_time_s(self) -> float:
        """Seconds from the request of the batch to the end of the step."""
        return self.stopwatch.seconds()

    @cached_property
    def timers(self) -> dict[str, float] | None:
        """Seconds of every phase of this rank since the last report; None without timers."""
        seconds: dict[str, float] = {}
        for name, watch in self.phases:
            seconds[name] = seconds.get(name, 0.0) + watch.seconds()
        return seconds or None

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks per second in this step."""
        return self.throughput.tokens_per_second(self.global_batch_size, self.step_time_s)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization, 0 to 1; None if the peak of the device is unknown."""
        return self.throughput.mfu(self.tokens_per_second)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON, without unset ones of `OPTIONAL`; not finite numbers become null."""
        values: dict[str, Any] = {}
        for name in FIELDS:
            values[name] = getattr(self.output if name in OUTPUT_FIELDS else self, name)
        for name in OPTIONAL:
            value = getattr(self, name)
            if value is not None:
                values[name] = value
        values |= self.output.metrics
        return {name: nan_to_none(value) for name, value in values.items()}


class SlowestRank:
    """Finds the slowest rank from the times that ranks exchange before a step; on CPUs only.

    On a GPU the device waits, not the host.

    Args:
        context: device and heartbeat of this rank.
        logs_all: whether reports have the times of all ranks, for `--log-straggler`.
    """

    def __init__(self, context: ParallelContext, *, logs_all: bool) -> None:
        self._logs_all = logs_all
        self._heartbeat = context.heartbeat
        self._is_measured = context.device.type == "cpu"
        self._waited_before_s = 0.0  # waits of this rank before the step
        # the last step
        self._busy_s = 0.0
        self._step_time_s = 0.0

    def begin(self) -> float | None:
        """Begin a step; returns the seconds of the last one without waits for other ranks."""
        self._waited_before_s = self._heartbeat.waited_s
        return self._busy_s if self._is_measured else None

    def finish(self, report: StepReport, busy_s: Sequence[float]) -> None:
        """Report the slowest rank of the previous step, and keep the busy time of this step.

        Args:
            report: report of this step.
            busy_s: busy time of each rank in the previous step.
        """
        if len(busy_s) > 1 and self._step_time_s:
            slowest = max(range(len(busy_s)), key=busy_s.__getitem__)
            others_s = (sum(busy_s) - busy_s[slowest]) / (len(busy_s) - 1)
            report.busy_s = busy_s if self._logs_all else None
            report.slowest_rank = slowest
            report.wait_for_slowest = min(1.0, (busy_s[slowest] - others_s) / self._step_time_s)
        waited_s = self._heartbeat.waited_s - self._waited_before_s
        self._busy_s = max(0.0, report.step_time_s - waited_s)
        self._step_time_s = report.step_time_s


class UnreadReports:
    """Reports whose numbers may not be on the host yet, in order."""

    def __init__(self) -> None:
        self._reports: list[StepReport] = []

    def take(self, report: StepReport) -> list[StepReport]:
        """Add a report; remove and return all at a logged step, else the ready ones."""
        self._reports.append(report)
        return self.take_all() if report.is_logged else self.take_ready()

    def take_all(self) -> list[StepReport]:
        """Remove and return all reports; reading them waits for the device."""
        reports = self._reports
        self._reports = []
        return reports

    def take_ready(self) -> list[StepReport]:
        """Remove and return the first reports, up to one that cannot be read without waiting."""
        reports = []
        while self._reports and self._reports[0].is_ready:
            reports.append(self._reports.pop(0))
        return reports


def nan_to_none(value: Any) -> Any:
    """A JSON value in which numbers that are not finite are replaced by None."""
    if isinstance(value, Mapping):
        return {name: nan_to_none(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [nan_to_none(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
