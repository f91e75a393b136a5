"""metrics.jsonl with every step, and one console line per `log_interval` steps, on the first rank.

A terminal also shows a progress bar, and in it whether the run trains, validates or saves. Steps
with a validation and the last step are always printed.

LogHook         writes both
describe        console lines of the steps since the last line
StepLine        columns of a step line, some of which narrow lines leave out
"""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task
from rich.text import Text

from nanotrain.checkpoint.store import saved_objects, step_folder
from nanotrain.runs.metrics_file import MetricsFile, MetricsSeal, warn_of_changes
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.run import Run
from nanotrain.train.step_report import SPIKE, StepReport

# Columns of the header where there is no terminal, and the fewest of any line.
MAX_WIDTH, MIN_WIDTH = 100, 60
LOG_WIDTH = 140  # columns of a step line where there is no terminal
SEPARATOR = " | "  # between the columns of a step line
# the wait for the slowest rank is shown from this share of the step time on: less is noise
NOTABLE_LAG = 0.1
# the phases of a step, then phases in which no step runs
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
SHOWN = {"validation": "validating", "checkpoint": "saving"}  # text of the progress bar


class _Phase(ProgressColumn):
    """The phase of the rank, from its heartbeat."""

    def render(self, task: Task) -> Text:
        """The text at this moment; rich's thread asks for it."""
        phase = task.fields["heartbeat"].read().phase
        return Text(f"{SHOWN.get(phase, 'training'):10}")


def _saved_seal(run: Run) -> MetricsSeal | None:
    """The seal of the metrics in the checkpoint that the run goes on from; None without one."""
    value = saved_objects(step_folder(run.checkpointer.folder, run.state.step)).get("metrics")
    try:
        return None if value is None else MetricsSeal.from_json(value)
    except ValueError:
        return None


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
        """Start the progress bar on the first rank; warn of a changed metrics.jsonl."""
        if not run.context.control.is_first:
            return
        if run.inputs.is_resumed:
            warn_of_changes(run.folder.metrics, step=run.state.step, seal=_saved_seal(run))
        self._progress.start()
        self._task = self._progress.add_task(
            "",
            total=run.config.train.train_iters,
            completed=run.state.step,
            heartbeat=run.context.heartbeat,
        )

    def begin_writing(self, run: Run, *, step: int) -> None:
        if run.context.control.is_first:
            self._metrics = MetricsFile(run.folder.metrics, step=step)

    def after_step(self, run: Run, report: StepReport) -> None:
        if self._metrics is None:
            return
        self._progress.update(self._task, completed=report.step)
        self._first_end = self._first_end or (report.step, time.monotonic())

    def after_read(self, run: Run, report: StepReport) -> None:
        """Write the row of the step; print a line at the interval."""
        if self._metrics is None:
            return
        self._metrics.append(report.to_json())
        self._since_line.append(report)
        if report.step % run.config.train.log_interval == 0 or report.valid_loss is not None:
            self._print_line(run)

    def after_rollback(self, run: Run, report: StepReport) -> None:
        """Write the row of the spike, then set it and later rows aside."""
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
        """Print one line on the steps since the last line."""
        width = LOG_WIDTH
        if self._console.is_terminal:
            width = max(MIN_WIDTH, self._console.width)
        line = describe(
            self._since_line,
            train_iters=run.config.train.train_iters,
            num_devices=run.context.topology.world_size,
            on_cpu=run.context.device.type == "cpu",
            seconds_per_step=self._seconds_per_step(),
            width=width,
        )
        self._console.print(line)
        self._since_line.clear()

    def _seconds_per_step(self) -> float | None:
        """Time per step with validations and saves; the first step is slower and not counted."""
        assert self._first_end is not None, "a line follows a step"
        step, ended = self._first_end
        num_steps = self._since_line[-1].step - step
        return (time.monotonic() - ended) / num_steps if num_steps else None


def describe(
    reports: list[StepReport],
    *,
    train_iters: int,
    num_devices: int,
    seconds_per_step: float | None = None,
    width: int = 1000,
    on_cpu: bool = False,
) -> str:
    """The console line of a step, a line of events, and a line with the times of phases.

    All step lines of a run have the same columns in the same order and of the same widths. Rates
    are means over the steps since the last line.

    Args:
        reports: reports of the steps since the last line, the printed step last.
        train_iters: steps of the run.
        num_devices: number of devices, one per rank.
        seconds_per_step: time per step with validations and checkpoints, for the remaining time;
            None: the mean of `reports`.
        width: columns; the least important parts do not fit into fewer.
        on_cpu: whether the whole process counts as its memory, not tensors only.
    """
    last = reports[-1]
    seconds = sum(report.step_time_s for report in reports)
    tokens = sum(report.tokens_per_second * report.step_time_s for report in reports)
    tokens_per_second = tokens / seconds
    wait = sum(report.data_wait_s for report in reports) / seconds
    if not seconds_per_step:
        seconds_per_step = seconds / len(reports)
    remaining_s = (train_iters - last.step) * seconds_per_step
    memory_label = "process" if on_cpu else "mem"
    line = StepLine()
    line.add(f"step {last.step:>{len(str(train_iters))}}/{train_iters}", priority=0)
    _add_training(line, last)
    line.add(f"{tokens_per_second:9,.0f} tok/s", priority=1)
    if num_devices > 1:
        line.add(f"{tokens_per_second / num_devices:9,.0f} per device", priority=8)
    line.add_optional("mfu {:5.1%}", last.mfu, priority=2)
    line.add(f"{memory_label} {last.peak_memory_bytes / 1e9:6.2f} GB", priority=4)
    line.add(f"data wait {wait:4.0%}", priority=5)
    line.add_optional("goodput {:5.1%}", last.goodput, priority=8)
    line.add(f"eta {_clock(remaining_s):>9}", priority=1)
    lines = [line.text(width)]
    for text in (_describe_events(reports), _describe_phases(reports)):
        if text:
            lines.append(f"  {text}")
    return "\n".join(lines)


def _add_training(line: "StepLine", report: StepReport) -> None:
    """Add loss, data, gradients, learning rates and the metrics of the parts."""
    output = report.output
    metrics = output.metrics
    moe = metrics.get("moe")
    mtp_losses = metrics.get("mtp_losses")
    line.add(f"loss {output.loss:7.4f}", priority=0)
    line.add_optional("data {:12}", report.data_stage, priority=7)
    line.add_optional("sequences of {:>7,}", report.seq_length, priority=7)
    line.add(f"grad {output.grad_norm:7.3f}", priority=3)
    line.add_optional("max logit {:7.2f}", metrics.get("max_attention_logit"), priority=7)
    line.add_optional("params norm {:9.3f}", metrics.get("params_norm"), priority=7)
    line.add_optional("zeros {:>14,}", metrics.get("num_zeros_in_grad"), priority=7)
    line.add(f"lr {report.lr:.2e}", priority=2)
    line.add_optional("decoupled lr {:.2e}", report.decoupled_lr, priority=7)
    if moe is not None:
        line.add(f"experts {moe['max_load']:6.2f}x, {moe['dropped']:5.1%} dropped", priority=6)
    if mtp_losses is not None:
        line.add(f"mtp {' '.join(f'{loss:7.4f}' for loss in mtp_losses)}", priority=6)
    line.add_optional("indexer {:7.4f}", metrics.get("dsa_indexer_loss"), priority=6)


class _Column(NamedTuple):
    """A text of a step line."""

    text: str
    priority: int  # the highest numbers are left out first


class StepLine:
    """The columns of a step line; narrow lines leave out columns of high priority numbers first.

    Whether a column is there depends on the settings of the run alone, and its length on no number,
    so that all lines of a run are aligned.

    >>> line = StepLine()
    >>> line.add("step 5", priority=0)
    >>> line.add("a long text", priority=1)
    >>> line.add_optional("lr {:.0e}", 1e-3, priority=2)
    >>> line.text(width=18)
    'step 5 | lr 1e-03'
    """

    def __init__(self) -> None:
        self._columns: list[_Column] = []

    def add(self, text: str, *, priority: int) -> None:
        """Add a column; one with priority 0 is never left out."""
        self._columns.append(_Column(text, priority))

    def add_optional(self, template: str, value: Any, *, priority: int) -> None:
        """Add a column with a formatted value unless the value is None."""
        if value is not None:
            self.add(template.format(value), priority=priority)

    def text(self, width: int) -> str:
        """The columns that fit into a line of `width` characters, in order."""
        columns = self._columns
        kept: set[int] = set()
        used = -len(SEPARATOR)  # characters of a line of the kept columns
        order = sorted(range(len(columns)), key=lambda index: (columns[index].priority, -index))
        for index in order:
            longer = used + len(SEPARATOR) + len(columns[index].text)
            if columns[index].priority == 0 or longer <= width:
                kept.add(index)
                used = longer
        return SEPARATOR.join([columns[index].text for index in sorted(kept)])


def _describe_events(reports: Sequence[StepReport]) -> str:
    """Validation, tasks, skips, spikes and waits in the steps since the last line."""
    last = reports[-1]
    events = []
    if last.valid_loss is not None:
        perplexity = math.exp(min(last.valid_loss, 700))
        events.append(f"valid {last.valid_loss:.4f} (ppl {perplexity:,.1f})")
    if last.valid_bits_per_byte is not None:
        events.append(f"{last.valid_bits_per_byte:.3f} bits per byte")
    events.append(_describe_tasks(last.evaluation or {}))
    events.append(_describe_skips(reports))
    events.append(_skip_reason(reports))
    events.append(_describe_spike(last))
    events.append(_describe_slowest(reports))
    events.append(_describe_busy(reports))
    stall_s = sum(report.save_stall_s or 0.0 for report in reports)
    if stall_s:
        events.append(f"save stall {stall_s:.2f} s")
    return " | ".join(event for event in events if event)


def _describe_phases(reports: Sequence[StepReport]) -> str:
    """Mean times of the phases of a step; empty without `--timing-log-level`."""
    times = [report.timers for report in reports if report.timers]
    if not times:
        return ""
    texts = []
    for phase in dict.fromkeys([*PHASES, *times[-1]]):
        mean_s = sum(seconds.get(phase, 0.0) for seconds in times) / len(reports)
        texts.append(f"{phase} {mean_s * 1e3:7,.1f}")
    return f"ms per step: {' | '.join(texts)}"


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds: a run of days keeps the width of its columns."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _describe_skips(reports: Sequence[StepReport]) -> str:
    """The number of skipped steps, and the ranks at fault."""
    skipped = sum(report.output.skipped for report in reports)
    if not skipped:
        return ""
    ranks = reports[-1].skipped_on
    where = f" on {ranks}" if ranks else ""
    return f"SKIPPED {skipped} (gradients not finite{where})"


def _skip_reason(reports: Sequence[StepReport]) -> str:
    """The first reason that a part gives for a skipped step; empty without one."""
    for report in reports:
        reason = report.output.metrics.get("skip_reason")
        if reason:
            return str(reason)
    return ""


def _describe_spike(report: StepReport) -> str:
    deviation = report.loss_deviation
    return "" if deviation is None or abs(deviation) < SPIKE else f"loss off by {deviation:.1f} std"


def _describe_tasks(evaluation: Mapping[str, float]) -> str:
    """The accuracy on each task."""
    texts = []
    for key, value in evaluation.items():
        if key.endswith("/accuracy"):
            task = key.split("/")[1]
            texts.append(f"{task} {value:.1%}")
    return ", ".join(texts)


def _describe_slowest(reports: Sequence[StepReport]) -> str:
    """The rank that was most often the slowest and the wait for it per step; empty if short."""
    ranks = [report.slowest_rank for report in reports if report.slowest_rank is not None]
    if not ranks:
        return ""
    slowest = max(set(ranks), key=ranks.count)
    waits = [report.wait_for_slowest or 0.0 for report in reports if report.slowest_rank == slowest]
    wait = sum(waits) / len(ranks)
    return f"wait for rank {slowest} {wait:.0%}" if wait >= NOTABLE_LAG else ""


def _describe_busy(reports: Sequence[StepReport]) -> str:
    """The ranks with the least and the most busy time, with `--log-straggler`; else empty."""
    measured = [report.busy_s for report in reports if report.busy_s]
    if not measured:
        return ""
    means = [fmean(times) for times in zip(*measured, strict=True)]
    fast = means.index(min(means))
    slow = means.index(max(means))
    return f"busy {means[fast]:.3f} s (rank {fast}) to {means[slow]:.3f} s (rank {slow})"
