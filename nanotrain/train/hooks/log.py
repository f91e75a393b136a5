"""metrics.jsonl with every step, and one console line per `log_interval` steps, on the first rank.

A terminal also shows a progress bar. Steps with a validation and the last step are always printed.
"""

import math
import sys
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from nanotrain.runs.metrics_file import MetricsFile
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.metrics import StepReport
from nanotrain.train.run import Run


class LogHook(Hook):
    """Logs to the console and to metrics.jsonl."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            redirect_stderr=sys.stderr.isatty(),
        )
        self._metrics: MetricsFile | None = None  # open on the first rank, while training
        self._since_line: list[StepReport] = []

    def before_training(self, run: Run) -> None:
        if not run.context.control.is_first:
            return
        self._metrics = MetricsFile(run.folder.metrics, step=run.state.step)
        if self._console.is_terminal:
            self._progress.start()
            self._task = self._progress.add_task("", total=run.config.train.train_iters, completed=run.state.step)

    def after_step(self, run: Run, report: StepReport) -> None:
        if self._metrics is None:
            return
        self._metrics.append(report.to_json())
        if self._console.is_terminal:
            self._progress.update(self._task, completed=report.step)
        self._since_line.append(report)
        if report.step % run.config.train.log_interval == 0 or report.valid_loss is not None:
            self._print_line(run)

    def after_training(self, run: Run) -> None:
        if self._since_line:
            self._print_line(run)

    def close(self, *, failed: bool) -> None:
        self._progress.stop()
        if self._metrics is not None:
            self._metrics.close()

    def _print_line(self, run: Run) -> None:
        train_iters, num_devices = run.config.train.train_iters, run.context.topology.world_size
        self._console.print(describe(self._since_line, train_iters=train_iters, num_devices=num_devices))
        self._since_line.clear()


def describe(reports: list[StepReport], *, train_iters: int, num_devices: int) -> str:
    """The console line of a step; rates are means over the steps since the last line.

    Args:
        reports: of the steps since the last line, the printed step last.
        train_iters: steps of the run.
        num_devices: one per rank.
    """
    last = reports[-1]
    seconds = sum(report.step_time_s for report in reports)
    tokens_per_second = sum(report.tokens_per_second * report.step_time_s for report in reports) / seconds
    wait = sum(report.data_wait_s for report in reports) / seconds
    remaining = timedelta(seconds=round((train_iters - last.step) * seconds / len(reports)))
    parts = [
        f"step {last.step}/{train_iters}",
        f"loss {last.loss:.4f}",
        f"grad norm {last.grad_norm:.3f}",
        f"lr {last.lr:.3e}",
        f"{tokens_per_second:,.0f} tok/s ({tokens_per_second / num_devices:,.0f} per device)",
        f"mem {last.peak_memory_bytes / 1e9:.2f} GB",
        f"data wait {wait:.1%}",
        f"eta {remaining}",
    ]
    if last.mfu is not None:
        parts.insert(5, f"mfu {last.mfu:.1%}")
    if last.moe is not None:
        parts.insert(3, f"experts {last.moe['max_load']:.2f}x max load, {last.moe['dropped']:.1%} dropped")
    if any(report.skipped for report in reports):
        parts.append(f"SKIPPED {sum(report.skipped for report in reports)} (gradients not finite)")
    if last.valid_loss is not None:
        parts.append(f"validation loss {last.valid_loss:.4f} (perplexity {math.exp(min(last.valid_loss, 700)):,.1f})")
    return " | ".join(parts)
