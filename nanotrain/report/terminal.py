"""Runs in the terminal: a list of them, a comparison of two or more, and the lanes of a profiled
step.
"""

from collections.abc import Sequence

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from nanotrain.report.history import RunHistory
from nanotrain.report.tables import config_differences, summary_of
from nanotrain.report.timeline import Timeline, rows_of

WIDE = 110  # columns of a terminal that shows everything
FOR_WIDE_TERMINALS = ("hours", "tokens", "saved")
COMPARED_STEPS = 8  # rows of the loss table, evenly spaced over the common steps


def terminal() -> Console:
    """The console; names and values are printed as they are."""
    return Console(markup=False, highlight=False, emoji=False)


def list_runs(runs: Sequence[RunHistory], *, console: Console) -> None:
    """Print one row per run: state, step, loss, rate, last change, size."""
    if not runs:
        console.print("no runs here")
        return
    rows = [summary_of(run) for run in runs]
    columns = [name for name in rows[0] if console.width >= WIDE or name not in FOR_WIDE_TERMINALS]
    # in the header, so that a time is one line of 80 columns
    header = [*columns[:-1], f"{columns[-1]} (UTC)"]
    table = _table(header, [[row[name].removesuffix(" UTC") for name in columns] for row in rows])
    table.columns[0].overflow = "fold"  # a long name takes several lines, the rest of the row one
    for column in table.columns[1:]:
        column.no_wrap = True
    console.print(table)


def compare_runs(runs: Sequence[RunHistory], *, console: Console) -> None:
    """Print the summaries side by side, the settings that differ, and the losses at common steps."""
    rows = [summary_of(run) for run in runs]
    header = ["", *(run.name for run in runs)]
    console.print(
        _table(header, [[key, *(row[key] for row in rows)] for key in rows[0] if key != "run"])
    )
    differences = config_differences(runs)
    ignored = {"train.run_dir"}
    settings = [[key, *values] for key, values in differences.items() if key not in ignored]
    console.print(
        _table(["setting", *header[1:]], settings) if settings else "the settings are equal"
    )
    losses = common_losses(runs)
    if losses:
        console.print(_table(["loss at step", *header[1:]], losses))


def print_timeline(timeline: Timeline, *, console: Console) -> None:
    """Print the share of hidden communication, and the lanes of every rank in milliseconds."""
    console.print(timeline.title)
    header, *rows = rows_of(timeline)
    console.print(_table(header, rows))
    if len(rows) < timeline.num_ranks:
        console.print(
            f"{len(rows)} of {timeline.num_ranks} profiled ranks; --ranks 0,1,8 chooses others"
        )


def common_losses(runs: Sequence[RunHistory]) -> list[list[str]]:
    """The loss of every run at evenly spaced steps that all of them have, the last one among them."""
    common = set.intersection(*({int(step) for step in run.column("step")} for run in runs))
    steps = sorted(common)
    chosen = (
        [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, COMPARED_STEPS).astype(int))]
        if steps
        else []
    )
    by_run = [
        dict(zip(run.column("step").astype(int).tolist(), run.column("loss"), strict=True))
        for run in runs
    ]
    return [[f"{step:,}", *(f"{losses[step]:.4f}" for losses in by_run)] for step in chosen]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(
        *header, box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0)
    )
    for row in rows:
        table.add_row(*row)
    return table
