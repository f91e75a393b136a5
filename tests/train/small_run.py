"""A small run in this process, built the way the command line builds it: Config -> RunInputs ->
Plan -> Run.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.load import load
from nanotrain.plan.plan import plan_run
from nanotrain.train.build import build_run
from nanotrain.train.fit import fit
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.inputs import open_inputs
from nanotrain.train.run import Run, RunInputs
from nanotrain.train.step_report import StepReport, Throughput

SEQ_LENGTH = 16
SIZES = [
    *("--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2"),
    *("--vocab-size", "260", "--seq-length", str(SEQ_LENGTH)),
]
QUIET = [
    *("--mock-data", "--num-workers", "0", "--eval-interval", "0"),
    *("--manual-gc-interval", "0", "--ddp-bucket-size", "5000"),
]


def arguments(folder: Path, *more: str) -> list[str]:
    """The command line of a small run on synthetic data; `more` has the last word."""
    return [*SIZES, *QUIET, "--run-dir", str(folder), *more]


def inputs_of(folder: Path, *more: str) -> RunInputs:
    return open_inputs(load(arguments(folder, *more)))[1]


@contextmanager
def small_run(folder: Path, *more: str, context: ParallelContext | None = None) -> Iterator[Run]:
    """A built run, its loader closed afterwards."""
    config, inputs = open_inputs(load(arguments(folder, *more)))
    plan = plan_run(
        config, context.topology.world_size if context else 1, rank=context.rank if context else 0
    )
    run = build_run(plan, inputs, context=context or ParallelContext.attach(plan.topology))
    try:
        yield run
    finally:
        run.batches.close()


def train(run: Run, *hooks: Hook) -> Run:
    fit(run, hooks)
    return run


class Spy(Hook):
    """Notes what it is called with."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.reports: list[StepReport] = []

    def before_training(self, run: Run) -> None:
        self.calls.append("before")

    def after_step(self, run: Run, report: StepReport) -> None:
        self.calls.append(f"step {report.step}")
        self.reports.append(report)

    def after_training(self, run: Run) -> None:
        self.calls.append("after")

    def close(self, *, failed: bool) -> None:
        self.calls.append("closed after an error" if failed else "closed")


class Failing(Hook):
    """Raises after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, run: Run, report: StepReport) -> None:
        if report.step == self.step:
            raise RuntimeError("a hook broke")


@dataclass
class KnownOutput:
    """The outcome of a step that was never on a device."""

    loss: float = 2.5
    grad_norm: float = 0.75
    skipped: bool = False
    loss_scale: float = 1.0
    metrics: dict[str, Any] = field(default_factory=dict)
    is_ready: bool = True


@dataclass
class KnownTime:
    """A stopped watch."""

    time_s: float
    is_ready: bool = True

    def seconds(self) -> float:
        return self.time_s


def report_of(step: int = 1, **fields: Any) -> StepReport:
    """A report with round numbers: 500 tokens per step in half a second."""

    def take(**defaults: Any) -> dict[str, Any]:
        return {name: fields.pop(name, value) for name, value in defaults.items()}

    output = KnownOutput(
        **take(loss=2.5, grad_norm=0.75, skipped=False, loss_scale=1.0, metrics={})
    )
    clock = take(step_time_s=0.5, data_wait_s=0.05)
    rates = take(tokens_per_second=1000.0, mfu=None)
    tokens = round(rates["tokens_per_second"] * clock["step_time_s"]) // 4
    peak = None if rates["mfu"] is None else rates["tokens_per_second"] * 10 / rates["mfu"]
    values = take(lr=1e-3, peak_memory_bytes=2_000_000_000, global_batch_size=4)
    values |= take(consumed_samples=4 * step, consumed_tokens=64 * step)
    return StepReport(
        step=step,
        output=fields.pop("output", output),
        stopwatch=KnownTime(clock["step_time_s"]),
        data_wait_s=clock["data_wait_s"],
        throughput=Throughput(tokens, 10, peak),
        **values,
        **fields,
    )


def metrics_of(folder: Path) -> Sequence[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
