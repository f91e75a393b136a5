"""The charts of a report as plotly figures in their JSON form ({"data": [...], "layout": {...}}),
without plotly.

Every chart over steps has one line per run, or one per run and name where its metric has names, as
a loss per corpus. Numbers of points are bounded: `keep_extremes` loses no spike, and page.js
smooths the means of `bin_means`, centred.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import groupby, product
from typing import Any

import numpy as np
import yaml

from nanotrain.report.history import RunHistory

Figure = dict[str, Any]

COLORS = ("#4269d0", "#e07b39", "#3ca951", "#a463f2", "#d6428c", "#6cc5b0", "#9c6b4e", "#868b94")
# of the names of a metric, where colors are those of runs
DASHES = ("solid", "dash", "dot", "dashdot")
MAX_POINTS = 1200  # per line of a chart
MAX_MEANS = 400  # per line that is smoothed, and per run of tokens and hours by step
MAX_HEAT_MAP_COLUMNS = 200
FEW_POINTS = 10  # of a line that is drawn with markers: a line through one point is not seen
MANY_RANKS = 4  # of fewer ranks one is always the slowest, which means nothing


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

    def names(self, columns: Iterable[str]) -> dict[str, str]:
        """The columns of the chart by what a star stands for, "" without one.

        >>> Chart(("a", "b.*"), "title", "unit").names(["c", "b.x", "a"])
        {'': 'a', 'x': 'b.x'}
        """
        patterns = [re.compile(re.escape(metric).replace(r"\*", "(.+)")) for metric in self.metrics]
        found = [(pattern.fullmatch(column), column) for pattern in patterns for column in columns]
        return {"".join(match.groups()): column for match, column in found if match}


TABLE = yaml.safe_load(
    resources.files(__package__).joinpath("charts.yaml").read_text(encoding="utf-8")
)
CHARTS = {section: [Chart(**row) for row in rows] for section, rows in TABLE.items()}
IDLE: dict[str, Callable[[np.ndarray], bool]] = {
    "absent": lambda values: not np.isfinite(values).any(),
    "constant": lambda values: len(np.unique(values[np.isfinite(values)])) <= 1,
    "never_positive": lambda values: not (values > 0).any(),
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
    """The charts over steps by section: those of `CHARTS`, then one per other group of metrics;
    without idle ones.
    """
    left = list(dict.fromkeys(name for run in runs for name in run.columns if name not in AXES))
    if max(run.world_size for run in runs) < MANY_RANKS:
        left = [name for name in left if name not in ("slowest_rank", "wait_for_slowest")]
    drawn: dict[str, list[Figure]] = {}
    for section, charts in CHARTS.items():
        for chart in charts:
            names = chart.names(left)
            left = [name for name in left if name not in names.values()]
            drawn.setdefault(section, []).append(_step_figure(chart, runs, names=names))
    for group, members in groupby(sorted(left), lambda name: name.rpartition(".")[0] or name):
        names = {name.removeprefix(f"{group}."): name for name in members}
        unit = next(
            (unit for end, unit in UNITS.items() if min(names.values()).endswith(end)), "value"
        )
        chart = Chart((group,), re.sub(r"[._/]+", " ", group).capitalize(), unit, idle="constant")
        drawn.setdefault("Other", []).append(_step_figure(chart, runs, names=names))
    (loss,), (validation, *_) = drawn["Loss"], drawn["Evaluation"]
    style = {"mode": "markers", "marker": {"size": 7, "symbol": "diamond"}}
    loss["data"] += [
        trace | style | {"name": f"{trace['name']} validation"} for trace in validation["data"]
    ]
    return {
        name: [each for each in figures if not each["layout"]["meta"]["idle"]]
        for name, figures in drawn.items()
    }


def axes_of(run: RunHistory) -> dict[str, list[float | None]]:
    """Steps with the tokens read and the hours trained until then: what the horizontal axis can
    show.
    """
    kept = (
        np.unique(np.linspace(0, run.num_steps - 1, MAX_MEANS).astype(int))
        if run.num_steps
        else np.arange(0)
    )
    columns = {
        "step": run.column("step"),
        "tokens": run.column("consumed_tokens"),
        "hours": run.hours,
    }
    return {name: rounded(values[kept]) for name, values in columns.items()}


def expert_figures(run: RunHistory) -> list[Figure]:
    """Heat maps of tokens per expert relative to the mean: over steps as a mean of the routers,
    then by router.
    """
    if not run.load:
        return []
    steps = run.column("step")
    shares = np.mean(
        [load / np.maximum(load.sum(axis=1, keepdims=True), 1) for load in run.load.values()],
        axis=0,
    )
    bins = np.array_split(np.arange(len(steps)), min(len(steps), MAX_HEAT_MAP_COLUMNS))
    by_bin = np.stack([shares[part].mean(axis=0) for part in bins], axis=1) * shares.shape[1]
    last = (
        np.stack([load[-1] / max(1.0, load[-1].sum()) for load in run.load.values()])
        * shares.shape[1]
    )
    over_time = _heat_map(by_bin, x=rounded(steps[[part[0] for part in bins]]))
    per_router = _heat_map(last, y=list(run.load))
    title, unit = f"{run.name}: tokens per expert", "x mean of the experts"
    by_expert = layout_of(f"{title}, mean over routers", unit=unit, x_title="step")
    by_expert["yaxis"]["title"] = {"text": "expert"}
    return [
        {"data": [over_time], "layout": by_expert},
        {
            "data": [per_router],
            "layout": layout_of(f"{title}, step {run.last_step}", unit=unit, x_title="expert"),
        },
    ]


def memory_figure(runs: Sequence[RunHistory]) -> Figure | None:
    """Planned memory per rank by part, one bar per run; None where no run has a plan."""
    planned = [(run.name, run.environment["memory"]) for run in runs if "memory" in run.environment]
    if not planned:
        return None
    data = []
    for part, color in zip(MEMORY_PARTS, COLORS, strict=False):
        sizes = [float(f"{plan.get(part, 0) / 1e9:.4g}") for _, plan in planned]
        bar = {"type": "bar", "orientation": "h", "name": part, "marker": {"color": color}}
        data.append(bar | {"y": [name for name, _ in planned], "x": sizes})
    layout = layout_of("Planned memory of the fullest rank", unit="GB", x_title="")
    layout["legend"]["traceorder"] = "normal"
    return {
        "data": data,
        "layout": layout | {"barmode": "stack", "height": 110 + 40 * len(planned)},
    }


def _step_figure(chart: Chart, runs: Sequence[RunHistory], *, names: Mapping[str, str]) -> Figure:
    data, is_idle = [], True
    for (index, run), (number, (label, column)) in product(
        enumerate(runs), enumerate(names.items())
    ):
        values, steps = run.column(column) * chart.scale, run.column("step")
        kept, is_alone = keep_extremes(values, MAX_POINTS), len(runs) == 1
        is_idle &= IDLE[chart.idle](values)
        if not len(kept):
            continue
        name = (
            (label or ("all" if len(names) > 1 else run.name))
            if is_alone
            else f"{run.name} {label}".rstrip()
        )
        color = COLORS[(number if is_alone else index) % len(COLORS)]
        line = {
            "width": 1.5,
            "color": color,
            "dash": DASHES[0 if is_alone else number % len(DASHES)],
        }
        mode = "lines+markers" if chart.style == "sparse" or len(kept) < FEW_POINTS else "lines"
        trace = {"type": "scatter", "mode": mode, "name": name, "line": line}
        means = (
            [rounded(each) for each in bin_means(steps, values)] if chart.style == "noisy" else None
        )
        of_line = {
            "run": index,
            "label": label,
            "means": means,
            "column": column,
            "scale": chart.scale,
        }
        points = {"x": rounded(steps[kept]), "y": rounded(values[kept]), "meta": of_line}
        data.append(trace | points)
    layout = layout_of(chart.title, unit=chart.unit)
    layout["yaxis"]["type"] = "log" if chart.is_log else "linear"
    layout["meta"] |= {"metrics": chart.metrics, "idle": is_idle}
    return {"data": data, "layout": layout}


def _heat_map(values: np.ndarray, **axes: list[Any]) -> Figure:
    rows, highest = [rounded(row) for row in values], max(2.0, float(values.max()))
    return {
        "type": "heatmap",
        "z": rows,
        "colorscale": "Viridis",
        "zmin": 0,
        "zmax": highest,
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
    """Six significant digits, or the whole number: what a screen shows, and half the bytes. None
    for NaN.
    """
    return [
        None
        if not np.isfinite(value)
        else float(f"{value:.6g}")
        if abs(value) < 1e6
        else round(value)
        for value in values.tolist()
    ]


def keep_extremes(values: np.ndarray, max_points: int) -> np.ndarray:
    """The indices to draw: of each of the bins the first, the smallest, the largest and the last
    finite value.

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
    for part in _bins(present, max_points // 4):
        low, high = part[np.argmin(values[part])], part[np.argmax(values[part])]
        kept += sorted({int(part[0]), int(low), int(high), int(part[-1])})
    return np.array(kept)


def bin_means(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means of the steps and of the finite values in at most MAX_MEANS bins; one value at least is
    finite.

    >>> bin_means(np.array([1.0, 2, 3]), np.array([5.0, np.nan, 7]))
    (array([1., 3.]), array([5., 7.]))
    """
    present = np.flatnonzero(np.isfinite(values))
    parts = _bins(present, MAX_MEANS)
    return np.array([steps[part].mean() for part in parts]), np.array(
        [values[part].mean() for part in parts]
    )


def _bins(values: np.ndarray, count: int) -> list[np.ndarray]:
    """At most `count` parts of equal sizes, and smaller ones at the beginning, where curves are
    steep.
    """
    edges = np.append(
        np.linspace(0, len(values), max(2, count * 3 // 4)),
        np.geomspace(1, len(values), count // 4),
    )
    return np.split(values, np.unique(edges.round().astype(int))[1:-1])
