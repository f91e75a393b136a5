"""metrics.jsonl with every step, and one console line per `log_interval` steps, on the first rank.

A terminal also shows a progress bar, and in it whether the run trains, validates or saves. Steps
with a validation and the last step are always printed.
"""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task
from rich.text import Text

from nanotrain.runs.metrics_file import MetricsFile
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.run import Run
from nanotrain.train.step_report import SPIKE, StepReport

# Columns of the header where there is no terminal, and the fewest of any line.
MAX_WIDTH, MIN_WIDTH = 100, 60
LOG_WIDTH = 140  # columns of a step line where there is no terminal
# the wait for the slowest rank is shown from this share of the step time on: less is noise
NOTABLE_LAG = 0.1
# of a step; and what the progress bar shows for those in which no step runs
PHASES = (
    "data",
    "forward-backward",
    "grad-reduce",
    "optimizer",
    "param-gather",
    "hooks",
    "validation",
    "checkpoint",
)
SHOWN = {"validation": "validating", "checkpoint": "saving"}


class _Phase(ProgressColumn):
    """What the rank is doing, from its heartbeat."""

    def render(self, task: Task) -> Text:
        """The text at this moment; rich's thread asks for it."""
        return Text(f"{SHOWN.get(task.fields['heartbeat'].read().phase, 'training'):10}")


class LogHook(Hook):
    """Logs to the console and to metrics.jsonl."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._progress = Progress(
            _Phase(),
            BarColumn(),
            MofNCompleteColumn(),
            console=self._console,
            redirect_stderr=sys.stderr.isatty(),
            # rich ends a bar with an empty line, also one that never began
            disable=not self._console.is_terminal,
        )
        self._metrics: MetricsFile | None = None  # open on the first rank, while training
        self._since_line: list[StepReport] = []
        # the first step and when it ended, for the remaining time
        self._first_end: tuple[int, float] | None = None

    def before_training(self, run: Run) -> None:
        if not run.context.control.is_first:
            return
        self._metrics = MetricsFile(run.folder.metrics, step=run.state.step)
        self._progress.start()
        total, done = run.config.train.train_iters, run.state.step
        self._task = self._progress.add_task(
            "", total=total, completed=done, heartbeat=run.context.heartbeat
        )

    def after_step(self, run: Run, report: StepReport) -> None:
        if self._metrics is None:
            return
        self._progress.update(self._task, completed=report.step)
        self._first_end = self._first_end or (report.step, time.monotonic())

    def after_read(self, run: Run, report: StepReport) -> None:
        if self._metrics is None:
            return
        self._metrics.append(report.to_json())
        self._since_line.append(report)
        if report.step % run.config.train.log_interval == 0 or report.valid_loss is not None:
            self._print_line(run)

    def after_rollback(self, run: Run, report: StepReport) -> None:
        if self._metrics is None:
            return
        self._metrics.append(report.to_json())
        self._metrics.close()
        # sets the later rows aside
        self._metrics = MetricsFile(run.folder.metrics, step=run.state.step)
        self._since_line.clear()
        self._first_end = None

    def after_training(self, run: Run) -> None:
        if self._since_line:
            self._print_line(run)

    def close(self, *, failed: bool) -> None:
        self._progress.stop()
        if self._metrics is not None:
            self._metrics.close()

    def _print_line(self, run: Run) -> None:
        assert self._first_end is not None, "a line follows a step"
        step, ended = self._first_end
        num_steps = self._since_line[-1].step - step  # the first step is slower and not counted
        line = describe(
            self._since_line,
            train_iters=run.config.train.train_iters,
            num_devices=run.context.topology.world_size,
            on_cpu=run.context.device.type == "cpu",
            seconds_per_step=(time.monotonic() - ended) / num_steps if num_steps else None,
            width=max(MIN_WIDTH, self._console.width) if self._console.is_terminal else LOG_WIDTH,
        )
        self._console.print(line)
        self._since_line.clear()


def describe(
    reports: list[StepReport],
    *,
    train_iters: int,
    num_devices: int,
    seconds_per_step: float | None = None,
    width: int = 1000,
    on_cpu: bool = False,
) -> str:
    """The console line of a step, and below it a line of what happened: validation, tasks, skips,
    spikes, saves.

    All step lines of a run have the same columns in the same order and of the same widths. Rates
    are means over the steps since the last line.

    Args:
        reports: reports of the steps since the last line, the printed step last.
        train_iters: steps of the run.
        num_devices: one per rank.
        seconds_per_step: time per step with validations and checkpoints, for the remaining time;
            None: the mean of `reports`.
        width: columns; the least important parts do not fit into fewer.
        on_cpu: the memory is that of the whole process, not of tensors only.
    """
    last, metrics, memory_label = (
        reports[-1],
        reports[-1].output.metrics,
        "process" if on_cpu else "mem",
    )
    seconds = sum(report.step_time_s for report in reports)
    tokens_per_second = (
        sum(report.tokens_per_second * report.step_time_s for report in reports) / seconds
    )
    wait = sum(report.data_wait_s for report in reports) / seconds
    remaining = (train_iters - last.step) * (seconds_per_step or seconds / len(reports))
    # text, and its order of removal on narrow lines, the highest number first; 0: never removed.
    # Whether a text is empty depends on the settings of the run alone, and its length on no number.
    parts = [
        (f"step {last.step:>{len(str(train_iters))}}/{train_iters}", 0),
        (f"loss {last.output.loss:7.4f}", 0),
        (f"data {last.data_stage:12}" if last.data_stage is not None else "", 7),
        (f"sequences of {last.seq_length:>7,}" if last.seq_length is not None else "", 7),
        (f"grad {last.output.grad_norm:7.3f}", 3),
        (
            f"max logit {metrics['max_attention_logit']:7.2f}"
            if "max_attention_logit" in metrics
            else "",
            7,
        ),
        (f"params norm {metrics['params_norm']:9.3f}" if "params_norm" in metrics else "", 7),
        (f"zeros {metrics['num_zeros_in_grad']:>14,}" if "num_zeros_in_grad" in metrics else "", 7),
        (f"lr {last.lr:.2e}", 2),
        (f"decoupled lr {last.decoupled_lr:.2e}" if last.decoupled_lr is not None else "", 7),
        (_describe_experts(metrics.get("moe")), 6),
        (
            f"mtp {' '.join(f'{loss:7.4f}' for loss in metrics['mtp_losses'])}"
            if "mtp_losses" in metrics
            else "",
            6,
        ),
        (f"indexer {metrics['dsa_indexer_loss']:7.4f}" if "dsa_indexer_loss" in metrics else "", 6),
        (f"{tokens_per_second:9,.0f} tok/s", 1),
        (f"{tokens_per_second / num_devices:9,.0f} per device" if num_devices > 1 else "", 8),
        (f"mfu {last.mfu:5.1%}" if last.mfu is not None else "", 2),
        (f"{memory_label} {last.peak_memory_bytes / 1e9:6.2f} GB", 4),
        (f"data wait {wait:4.0%}", 5),
        (f"eta {_clock(remaining):>9}", 1),
    ]
    lines = [
        fit([part for part in parts if part[0]], width),
        *(f"  {text}" for text in _notes(reports) if text),
    ]
    return "\n".join(lines)


def _notes(reports: Sequence[StepReport]) -> tuple[str, str]:
    """What happened in the steps since the last line, and the time of their phases; empty without."""
    last, skipped = reports[-1], sum(report.output.skipped for report in reports)
    stall, valid = sum(report.save_stall_s or 0.0 for report in reports), last.valid_loss
    where = f" on {last.skipped_on}" if last.skipped_on else ""
    happened = [
        f"valid {valid:.4f} (ppl {math.exp(min(valid, 700)):,.1f})" if valid is not None else "",
        f"{last.valid_bits_per_byte:.3f} bits per byte"
        if last.valid_bits_per_byte is not None
        else "",
        _describe_tasks(last.evaluation or {}),
        f"SKIPPED {skipped} (gradients not finite{where})" if skipped else "",
        next(
            (text for report in reports if (text := report.output.metrics.get("skip_reason"))), ""
        ),
        _describe_spike(last),
        _describe_slowest(reports),
        _describe_busy(reports),
        f"save stall {stall:.2f} s" if stall else "",
    ]
    times = [report.timers for report in reports if report.timers]
    names = dict.fromkeys([*PHASES, *(times or [{}])[-1]])
    means = {name: sum(each.get(name, 0.0) for each in times) / len(reports) for name in names}
    phases = " | ".join(f"{name} {mean * 1e3:7,.1f}" for name, mean in means.items())
    return " | ".join(filter(None, happened)), f"ms per step: {phases}" if times else ""


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds: a run of days keeps the width of its columns."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def fit(parts: Sequence[tuple[str, int]], width: int) -> str:
    """Join texts to a line of at most `width` columns; texts with high numbers are left out first,
    those with 0 never.

    >>> fit([("step 5", 0), ("a long text", 1), ("lr 1e-3", 2)], 18)
    'step 5 | lr 1e-3'
    """
    line, kept = "", set[int]()
    for index in sorted(range(len(parts)), key=lambda index: (parts[index][1], -index)):
        longer = " | ".join(
            text for place, (text, _) in enumerate(parts) if place in {*kept, index}
        )
        if len(longer) <= width or not parts[index][1]:
            line, kept = longer, {*kept, index}
    return line


def _describe_experts(moe: dict[str, Any] | None) -> str:
    if moe is None:
        return ""
    return f"experts {moe['max_load']:6.2f}x, {moe['dropped']:5.1%} dropped"


def _describe_spike(report: StepReport) -> str:
    deviation = report.loss_deviation
    return "" if deviation is None or abs(deviation) < SPIKE else f"loss off by {deviation:.1f} std"


def _describe_tasks(evaluation: Mapping[str, float]) -> str:
    """The accuracy on each task."""
    scores = {
        key.split("/")[1]: value for key, value in evaluation.items() if key.endswith("/accuracy")
    }
    return ", ".join(f"{name} {accuracy:.1%}" for name, accuracy in scores.items())


def _describe_slowest(reports: Sequence[StepReport]) -> str:
    """The rank that was most often the slowest and how long the others waited for it; empty for
    short waits.
    """
    ranks = [report.slowest_rank for report in reports if report.slowest_rank is not None]
    if not ranks:
        return ""
    slowest = max(set(ranks), key=ranks.count)
    wait = sum(
        report.wait_for_slowest or 0.0 for report in reports if report.slowest_rank == slowest
    ) / len(ranks)
    return f"wait for rank {slowest} {wait:.0%}" if wait >= NOTABLE_LAG else ""


def _describe_busy(reports: Sequence[StepReport]) -> str:
    """The least and the most mean seconds in which a rank did not wait, with `--log-straggler`;
    else empty.
    """
    means = [
        fmean(times)
        for times in zip(*(report.busy_s for report in reports if report.busy_s), strict=True)
    ]
    if not means:
        return ""
    fast, slow = means.index(min(means)), means.index(max(means))
    return f"busy {means[fast]:.3f} s (rank {fast}) to {means[slow]:.3f} s (rank {slow})"
