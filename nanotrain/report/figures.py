"""The charts of a report as plotly figures in JSON form, made without plotly.

A figure is {"data": [...], "layout": {...}}.

Every chart over steps has one line per run, or one per run and name where its metric has names, as
a loss per corpus. Numbers of points are bounded: `keep_extremes` loses no spike, and page.js
smooths the means of `bin_means`, centred.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import groupby
from typing import Any

import numpy as np
import yaml

from nanotrain.report.history import RunHistory

Figure = dict[str, Any]

COLORS = ("#4269d0", "#e07b39", "#3ca951", "#a463f2", "#d6428c", "#6cc5b0", "#9c6b4e", "#868b94")
# line styles of metric names, if colors stand for runs
DASHES = ("solid", "dash", "dot", "dashdot")
MAX_POINTS = 1200  # per line of a chart
MAX_MEANS = 400  # per line that is smoothed, and per run of tokens and hours by step
MAX_HEAT_MAP_COLUMNS = 200
FEW_POINTS = 10  # a line of so few points has markers: a line through one point is not seen
MANY_RANKS = 4  # with fewer ranks one is always the slowest, which means nothing


@dataclass(frozen=True)
class Chart:
    """One chart over steps: its metrics, how they are shown, and where it is left out."""

    metrics: tuple[str, ...]  # names; "norms.grad.*" stands for all such names, one line each
    title: str
    unit: str
    scale: float = 1.0  # multiplies the values
    is_log: bool = False
    # "noisy": smoothed; "exact": never smoothed; "sparse": few values, drawn as markers
    style: str = "noisy"
    idle: str = "absent"  # left out where this holds for the values of all lines: a key of IDLE
    # metric with the number of questions behind a share, from which error bars follow
    questions: str = ""

    def names(self, columns: Sequence[str]) -> dict[str, str]:
        """The columns of the chart, by the text that the star of a metric matches; "" without star.

        >>> Chart(("a", "b.*"), "title", "unit").names(["c", "b.x", "a"])
        {'': 'a', 'x': 'b.x'}
        """
        names = {}
        for metric in self.metrics:
            pattern = re.compile(re.escape(metric).replace(r"\*", "(.+)"))
            for column in columns:
                if match := pattern.fullmatch(column):
                    names["".join(match.groups())] = column
        return names


TABLE = yaml.safe_load(
    resources.files(__package__).joinpath("charts.yaml").read_text(encoding="utf-8")
)
CHARTS: dict[str, list[Chart]] = {}
for section, rows in TABLE.items():
    CHARTS[section] = [Chart(**row) for row in rows]


def is_absent(values: np.ndarray) -> bool:
    """Whether no value is finite."""
    return not np.isfinite(values).any()


def is_constant(values: np.ndarray) -> bool:
    """Whether all finite values are equal."""
    finite = values[np.isfinite(values)]
    return len(np.unique(finite)) <= 1


def is_never_positive(values: np.ndarray) -> bool:
    """Whether no value is above zero."""
    return not (values > 0).any()


def is_zero(values: np.ndarray) -> bool:
    """Whether all finite values are zero."""
    return not values[np.isfinite(values)].any()


def has_one_point(values: np.ndarray) -> bool:
    """Whether at most one value is finite."""
    return np.isfinite(values).sum() <= 1


IDLE: dict[str, Callable[[np.ndarray], bool]] = {
    "absent": is_absent,
    "constant": is_constant,
    "never_positive": is_never_positive,
}
# or equal on a slope for every run
AXES = frozenset({"step", "consumed_samples", "consumed_tokens"})
# by the end of a name
UNITS = {
    "_s": "s",
    "_bytes": "bytes",
    "_per_second": "per second",
    "loss": "nats per token",
    "norm": "2-norm",
}
MEMORY_PARTS = (
    "params",
    "grads",
    "optimizer",
    "activations",
    "working",
    "communication",
    "runtime",
)


def step_figures(runs: Sequence[RunHistory]) -> dict[str, list[Figure]]:
    """The charts over steps by section, without idle ones.

    The rows of `CHARTS` come first, then one chart per other group of metrics.
    """
    remaining = metrics_of(runs)
    by_section: dict[str, list[Figure]] = {}
    for section, charts in CHARTS.items():
        by_section[section] = []
        for chart in charts:
            names = chart.names(remaining)
            remaining = [name for name in remaining if name not in names.values()]
            by_section[section].append(step_figure(chart, runs, names=names))
    by_section.setdefault("Other", []).extend(other_figures(runs, remaining))
    add_validation(by_section["Loss"][0], validation=by_section["Evaluation"][0])
    shown = {}
    for section, figures in by_section.items():
        shown[section] = [figure for figure in figures if not figure["layout"]["meta"]["idle"]]
    return shown


def metrics_of(runs: Sequence[RunHistory]) -> list[str]:
    """The metrics that charts may show, in order."""
    hidden = set(AXES)
    if max(run.world_size for run in runs) < MANY_RANKS:
        hidden |= {"slowest_rank", "wait_for_slowest"}
    names: dict[str, None] = {}
    for run in runs:
        names |= dict.fromkeys(run.columns)
    return [name for name in names if name not in hidden]


def other_figures(runs: Sequence[RunHistory], metrics: Sequence[str]) -> list[Figure]:
    """One chart per group of metrics that no row of `CHARTS` names."""
    figures = []
    for group, members in groupby(sorted(metrics), lambda name: name.rpartition(".")[0] or name):
        names = {name.removeprefix(f"{group}."): name for name in members}
        title = re.sub(r"[._/]+", " ", group).capitalize()
        chart = Chart((group,), title, unit_of(min(names.values())), idle="constant")
        figures.append(step_figure(chart, runs, names=names))
    return figures


def unit_of(metric: str) -> str:
    """The unit of a metric by the end of its name."""
    for end, unit in UNITS.items():
        if metric.endswith(end):
            return unit
    return "value"


def add_validation(loss: Figure, *, validation: Figure) -> None:
    """Add the points of validation to the chart of the loss."""
    style = {"mode": "markers", "marker": {"size": 7, "symbol": "diamond"}}
    for trace in validation["data"]:
        loss["data"].append(trace | style | {"name": f"{trace['name']} validation"})


def axes_of(run: RunHistory) -> dict[str, list[float | None]]:
    """Values of the horizontal axes: steps, tokens read and hours trained."""
    kept = np.arange(0)
    if run.num_steps:
        kept = np.unique(np.linspace(0, run.num_steps - 1, MAX_MEANS).astype(int))
    return {
        "step": rounded(run.column("step")[kept]),
        "tokens": rounded(run.column("consumed_tokens")[kept]),
        "hours": rounded(run.hours[kept]),
    }


def expert_figures(run: RunHistory) -> list[Figure]:
    """Heat maps of tokens per expert relative to the mean, over steps and by router.

    The first one shows the mean of the routers over steps, the second one the last step by router.
    """
    if not run.load:
        return []
    steps = run.column("step")
    shares_by_router = []
    last_shares = []
    for load in run.load.values():
        totals = load.sum(axis=1, keepdims=True)
        shares_by_router.append(load / np.maximum(totals, 1))
        last_shares.append(load[-1] / max(1.0, load[-1].sum()))
    shares = np.mean(shares_by_router, axis=0)
    bins = np.array_split(np.arange(len(steps)), min(len(steps), MAX_HEAT_MAP_COLUMNS))
    by_bin = np.stack([shares[part].mean(axis=0) for part in bins], axis=1) * shares.shape[1]
    first_steps = steps[[part[0] for part in bins]]
    title = f"{run.name}: tokens per expert"
    unit = "x mean of the experts"
    over_steps = layout_of(f"{title}, mean over routers", unit=unit, x_title="step")
    over_steps["yaxis"]["title"] = {"text": "expert"}
    per_router = layout_of(f"{title}, step {run.last_step}", unit=unit, x_title="expert")
    last = np.stack(last_shares) * shares.shape[1]
    return [
        {"data": [heat_map(by_bin, x=rounded(first_steps))], "layout": over_steps},
        {"data": [heat_map(last, y=list(run.load))], "layout": per_router},
    ]


def memory_figure(runs: Sequence[RunHistory]) -> Figure | None:
    """Planned memory per rank by part, one bar per run; None where no run has a plan."""
    planned = [run for run in runs if "memory" in run.environment]
    if not planned:
        return None
    names = [run.name for run in planned]
    data = []
    for part, color in zip(MEMORY_PARTS, COLORS, strict=False):
        num_bytes = [run.environment["memory"].get(part, 0) for run in planned]
        sizes = [float(f"{size / 1e9:.4g}") for size in num_bytes]
        bar = {"type": "bar", "orientation": "h", "name": part, "marker": {"color": color}}
        data.append(bar | {"y": names, "x": sizes})
    layout = layout_of("Planned memory of the fullest rank", unit="GB", x_title="")
    layout["legend"]["traceorder"] = "normal"
    layout["barmode"] = "stack"
    layout["height"] = 110 + 40 * len(planned)
    return {"data": data, "layout": layout}


def step_figure(chart: Chart, runs: Sequence[RunHistory], *, names: Mapping[str, str]) -> Figure:
    """A chart over steps: a line per run and name, and whether it is idle.

    Args:
        chart: the chart.
        runs: all runs.
        names: columns by the names of their lines.
    """
    data = []
    is_idle = True
    for run_index, run in enumerate(runs):
        for line_index, (label, column) in enumerate(names.items()):
            values = run.column(column) * chart.scale
            if not is_idle_line(chart, values, run=run):
                is_idle = False
            kept = keep_extremes(values, MAX_POINTS)
            if not len(kept):
                continue
            if len(runs) > 1:
                name = f"{run.name} {label}".rstrip()
                style = line_style(color=run_index, dash=line_index)
            else:
                name = label or ("all" if len(names) > 1 else run.name)
                style = line_style(color=line_index, dash=0)
            trace = line_of(chart, run.column("step"), values=values, kept=kept)
            trace["name"] = name
            trace["line"] = style
            trace["meta"] |= {"run": run_index, "label": label, "column": column}
            if chart.questions:
                trace["error_y"] = error_bars(chart, run, label=label, values=values, kept=kept)
            data.append(trace)
    layout = layout_of(chart.title, unit=chart.unit)
    layout["yaxis"]["type"] = "log" if chart.is_log else "linear"
    layout["meta"]["metrics"] = chart.metrics
    layout["meta"]["idle"] = is_idle
    return {"data": data, "layout": layout}


def is_idle_line(chart: Chart, values: np.ndarray, *, run: RunHistory) -> bool:
    """Whether a line has nothing to show: as the chart says, zeros, or one point of an ended run.

    The training loss is always shown.
    """
    if chart.metrics == ("loss",):
        return is_absent(values)
    is_single = has_one_point(values) and run.state() != "running"
    return IDLE[chart.idle](values) or is_zero(values) or is_single


def error_bars(
    chart: Chart, run: RunHistory, *, label: str, values: np.ndarray, kept: np.ndarray
) -> dict[str, Any]:
    """Standard errors of shares of right answers: sqrt(p * (1 - p) / questions)."""
    questions = run.column(chart.questions.replace("*", label))[kept]
    shares = values[kept] / chart.scale
    with np.errstate(invalid="ignore", divide="ignore"):
        errors = chart.scale * np.sqrt(shares * (1 - shares) / questions)
    return {"type": "data", "array": rounded(errors), "thickness": 1, "width": 3}


def line_style(*, color: int, dash: int) -> dict[str, Any]:
    """The style of a line by the indices of its color and of its dash."""
    return {
        "width": 1.5,
        "color": COLORS[color % len(COLORS)],
        "dash": DASHES[dash % len(DASHES)],
    }


def line_of(
    chart: Chart, steps: np.ndarray, *, values: np.ndarray, kept: np.ndarray
) -> dict[str, Any]:
    """A line of a chart: its kept points, and the means that a smoothed line is drawn from."""
    has_markers = chart.style == "sparse" or len(kept) < FEW_POINTS
    means = None
    if chart.style == "noisy":
        mean_steps, mean_values = bin_means(steps, values)
        means = [rounded(mean_steps), rounded(mean_values)]
    return {
        "type": "scatter",
        "mode": "lines+markers" if has_markers else "lines",
        "x": rounded(steps[kept]),
        "y": rounded(values[kept]),
        "meta": {"means": means, "scale": chart.scale},
    }


def heat_map(values: np.ndarray, **axes: list[Any]) -> Figure:
    """A heat map of rows of values from 0 to 2 or their maximum."""
    return {
        "type": "heatmap",
        "z": [rounded(row) for row in values],
        "colorscale": "Viridis",
        "zmin": 0,
        "zmax": max(2.0, float(values.max())),
    } | axes


def layout_of(title: str, *, unit: str, x_title: str = "step") -> Figure:
    """The layout of a chart; the page writes title and unit above it."""
    return {
        "meta": {"title": title, "unit": unit},
        "xaxis": {"title": {"text": x_title}, "automargin": True},
        "yaxis": {"automargin": True},
        "height": 260,
        "margin": {"l": 50, "r": 16, "t": 12, "b": 45},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
    }


def rounded(values: np.ndarray) -> list[float | None]:
    """Round numbers to the precision of a screen, which halves the bytes.

    Six significant digits, or the whole number; None for values that are not finite.
    """
    return [rounded_number(value) for value in values.tolist()]


def rounded_number(value: float) -> float | None:
    """A number rounded as `rounded` does."""
    if not math.isfinite(value):
        return None
    if abs(value) < 1e6:
        return float(f"{value:.6g}")
    return round(value)


def keep_extremes(values: np.ndarray, max_points: int) -> np.ndarray:
    """The indices to draw: the first, smallest, largest and last finite value of every bin.

    A spike of one step stays visible at its own step, whatever the number of steps.

    Args:
        values: [n], with NaN where there is no value; all such points are dropped.
        max_points: upper bound of the number of indices; at least 4.

    Returns:
        [m] int64, ascending, m <= max_points.

    >>> keep_extremes(np.array([0.0, 0, 9, 0, 0, 0, 0, 0, 0, -5, 0, 0]), 4).tolist()
    [0, 2, 9, 11]
    """
    present = np.flatnonzero(np.isfinite(values))
    if len(present) <= max_points:
        return present
    kept: list[int] = []
    for part in bins_of(present, max_points // 4):
        lowest = part[np.argmin(values[part])]
        highest = part[np.argmax(values[part])]
        kept += sorted({int(part[0]), int(lowest), int(highest), int(part[-1])})
    return np.array(kept)


def bin_means(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means of steps and finite values in at most MAX_MEANS bins; one value at least is finite.

    >>> bin_means(np.array([1.0, 2, 3]), np.array([5.0, np.nan, 7]))
    (array([1., 3.]), array([5., 7.]))
    """
    present = np.flatnonzero(np.isfinite(values))
    bins = bins_of(present, MAX_MEANS)
    mean_steps = [steps[part].mean() for part in bins]
    mean_values = [values[part].mean() for part in bins]
    return np.array(mean_steps), np.array(mean_values)


def bins_of(values: np.ndarray, count: int) -> list[np.ndarray]:
    """Split values into at most `count` bins of equal sizes, smaller at the steep beginning."""
    even = np.linspace(0, len(values), max(2, count * 3 // 4))
    early = np.geomspace(1, len(values), count // 4)
    edges = np.append(even, early).round().astype(int)
    return np.split(values, np.unique(edges)[1:-1])
