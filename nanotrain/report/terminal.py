"""Runs in the terminal: a list, a comparison of several, and the lanes of a profiled step."""

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
        console.print("no runs")
        return
    rows = [summary_of(run) for run in runs]
    columns = list(rows[0])
    if console.width < WIDE:
        columns = [name for name in columns if name not in FOR_WIDE_TERMINALS]
    # in the header, so that a time is one line of 80 columns
    header = [*columns[:-1], f"{columns[-1]} (UTC)"]
    cells = []
    for row in rows:
        cells.append([row[name].removesuffix(" UTC") for name in columns])
    table = _table(header, cells)
    table.columns[0].overflow = "fold"  # a long name takes several lines, the rest of the row one
    for column in table.columns[1:]:
        column.no_wrap = True
    console.print(table)


def compare_runs(runs: Sequence[RunHistory], *, console: Console) -> None:
    """Print summaries side by side, the settings that differ, and the losses at common steps."""
    names = [run.name for run in runs]
    summaries = [summary_of(run) for run in runs]
    rows = []
    for key in summaries[0]:
        if key != "run":
            rows.append([key, *(summary[key] for summary in summaries)])
    console.print(_table(["", *names], rows))
    differences = config_differences(runs)
    differences.pop("train.run_dir", None)
    if differences:
        settings = [[key, *values] for key, values in differences.items()]
        console.print(_table(["setting", *names], settings))
    else:
        console.print("the settings are equal")
    losses = common_losses(runs)
    if losses:
        console.print(_table(["loss at step", *names], losses))


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
    """The loss of every run at evenly spaced steps that all of them have, the last one included."""
    losses_of_runs = []
    for run in runs:
        steps = run.column("step").astype(int).tolist()
        losses_of_runs.append(dict(zip(steps, run.column("loss"), strict=True)))
    common = sorted(set.intersection(*map(set, losses_of_runs)))
    if not common:
        return []
    rows = []
    for index in np.unique(np.linspace(0, len(common) - 1, COMPARED_STEPS).astype(int)):
        step = common[index]
        losses = [f"{losses[step]:.4f}" for losses in losses_of_runs]
        rows.append([f"{step:,}", *losses])
    return rows


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table for the terminal."""
    table = Table(
        *header, box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0)
    )
    for row in rows:
        table.add_row(*row)
    return table
