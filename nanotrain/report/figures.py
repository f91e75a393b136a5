"""The charts of a report as plotly figures in their JSON form ({"data": [...], "layout": {...}}), without plotly.

Every chart over steps has one line per run in the run's color. Numbers of points are bounded by `keep_extremes`,
which loses no spike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from nanotrain.report.history import RunHistory

Figure = dict[str, Any]

COLORS = ("#4269d0", "#e07b39", "#3ca951", "#a463f2", "#d6428c", "#6cc5b0", "#9c6b4e", "#868b94")
MAX_POINTS = 1200  # per line of a chart
MAX_HEAT_MAP_COLUMNS = 200
# The smoothed loss averages over the last of these, over a fiftieth of a long run, or over a twelfth of a short one,
# where the average of 50 steps would lag far behind.
SMOOTHED_STEPS = 50


@dataclass(frozen=True)
class Chart:
    """One chart over steps: the metric, how it is shown, and where it is left out."""

    column: str
    title: str
    unit: str = ""
    scale: float = 1.0  # multiplies the values
    is_log: bool = False
    # left out where this holds for the values of all runs
    is_idle: Callable[[np.ndarray], bool] = lambda values: not np.isfinite(values).any()


def _is_constant(values: np.ndarray) -> bool:
    return len(np.unique(values[np.isfinite(values)])) <= 1


def _is_never_positive(values: np.ndarray) -> bool:
    return not (values > 0).any()


CHARTS = (
    Chart("loss_deviation", "loss against the last 1000", "standard deviations"),
    Chart("lr", "learning rate"),
    Chart("grad_norm", "gradient norm", is_log=True),
    Chart("tokens_per_second", "throughput", "tokens/s"),
    Chart("mfu", "model FLOPs utilization", "%", scale=100.0),
    Chart("peak_memory_bytes", "peak memory of rank 0", "GB", scale=1e-9),
    Chart("step_time_s", "time per step", "s"),
    Chart("data_wait_s", "wait for data per step", "ms", scale=1e3),
    Chart("skipped", "skipped steps", is_idle=_is_never_positive),
    Chart("loss_scale", "loss scale", is_log=True, is_idle=_is_constant),
    Chart("moe.max_load", "busiest expert", "x mean load"),
    Chart("moe.dropped", "dropped tokens", "%", scale=100.0, is_idle=_is_never_positive),
    Chart("moe.balance_loss", "load balancing loss"),
    Chart("moe.entropy", "router entropy", "nats"),
)
# shown by the loss chart, by an axis, or equal on a slope for every run
SHOWN_ELSEWHERE = frozenset({"step", "loss", "valid_loss", "consumed_samples", "consumed_tokens"})
MEMORY_PARTS = ("params", "grads", "optimizer", "activations", "working", "communication")


def loss_figure(runs: Sequence[RunHistory]) -> Figure:
    """Loss against steps, tokens or hours, with buttons: raw thin, smoothed thick, validation as markers."""
    data: list[Figure] = []
    axes: list[list[np.ndarray]] = [[], [], []]
    longest = max(run.num_steps for run in runs)  # one window for all: equal losses give equal lines
    window = max(1, min(SMOOTHED_STEPS, longest // 12), longest // 50)
    for run, color in zip(runs, cycle(COLORS), strict=False):
        loss, valid = run.column("loss"), run.column("valid_loss")
        lines = (
            ("", loss, {"mode": "lines", "line": {"width": 1, "color": color}, "opacity": 0.3, "hoverinfo": "skip"}),
            (" smoothed", smooth(loss, window), {"mode": "lines", "line": {"width": 2, "color": color}}),
            (" validation", valid, {"mode": "markers", "marker": {"size": 7, "symbol": "diamond", "color": color}}),
        )
        for suffix, values, style in lines:
            kept = keep_extremes(values, MAX_POINTS)
            if not len(kept):
                continue
            for axis, x in zip(axes, (run.column("step"), run.column("consumed_tokens"), run.hours), strict=True):
                axis.append(x[kept])
            trace = {"type": "scatter", "name": run.name + suffix, "x": _rounded(axes[0][-1]), "legendgroup": run.name}
            data.append(trace | {"y": _rounded(values[kept]), "showlegend": suffix != ""} | style)
    titles = ("step", "tokens", "hours of training")
    choose = [
        {"label": title, "method": "update", "args": [{"x": [_rounded(x) for x in axis]}, {"xaxis.title.text": title}]}
        for title, axis in zip(titles, axes, strict=True)
    ]
    scales = [
        {"label": f"{label} {kind}", "method": "relayout", "args": [{f"{axis}axis.type": kind}]}
        for label, axis in (("loss", "y"), ("x", "x"))
        for kind in ("linear", "log")
    ]
    layout = layout_of("", x_title="step", y_title="loss")
    layout |= {"height": 460, "updatemenus": [_buttons(choose, 0.0), _buttons(scales, 0.5)]}
    return {"data": data, "layout": layout}


def step_figures(runs: Sequence[RunHistory]) -> list[Figure]:
    """One figure per metric that some run has and that is not idle in all of them; unknown metrics come last."""
    known = {chart.column for chart in CHARTS} | SHOWN_ELSEWHERE
    others = dict.fromkeys(name for run in runs for name in run.columns if name not in known)
    charts = [*CHARTS, *(Chart(name, name.replace("_", " "), is_idle=_is_constant) for name in others)]
    active = (chart for chart in charts if not all(chart.is_idle(run.column(chart.column)) for run in runs))
    return [_step_figure(chart, runs) for chart in active]


def expert_figures(run: RunHistory) -> list[Figure]:
    """Heat maps of tokens per expert relative to the mean: over steps as a mean of the routers, then by router."""
    if not run.load:
        return []
    steps = run.column("step")
    shares = np.mean([load / np.maximum(load.sum(axis=1, keepdims=True), 1) for load in run.load.values()], axis=0)
    bins = np.array_split(np.arange(len(steps)), min(len(steps), MAX_HEAT_MAP_COLUMNS))
    by_bin = np.stack([shares[part].mean(axis=0) for part in bins], axis=1) * shares.shape[1]
    last = np.stack([load[-1] / max(1.0, load[-1].sum()) for load in run.load.values()]) * shares.shape[1]
    over_time = _heat_map(by_bin, x=_rounded(steps[[part[0] for part in bins]]))
    per_router = _heat_map(last, y=list(run.load))
    title = f"{run.name}: tokens per expert relative to the mean"
    return [
        {"data": [over_time], "layout": layout_of(f"{title}, mean over routers", x_title="step", y_title="expert")},
        {"data": [per_router], "layout": layout_of(f"{title}, step {run.last_step}", x_title="expert")},
    ]


def memory_figure(runs: Sequence[RunHistory]) -> Figure | None:
    """Planned memory per rank by part, one bar per run; None where no run has a plan."""
    plans = [(run.name, run.environment.get("memory")) for run in runs]
    planned = [(name, plan) for name, plan in plans if isinstance(plan, dict)]
    if not planned:
        return None
    data = []
    for part, color in zip(MEMORY_PARTS, COLORS, strict=False):
        sizes = [float(f"{plan.get(part, 0) / 1e9:.4g}") for _, plan in planned]
        bar = {"type": "bar", "orientation": "h", "name": part, "marker": {"color": color}}
        data.append(bar | {"y": [name for name, _ in planned], "x": sizes})
    layout = layout_of("planned memory of the fullest rank, GB", x_title="")
    layout["legend"]["traceorder"] = "normal"
    return {"data": data, "layout": layout | {"barmode": "stack", "height": 160 + 40 * len(planned)}}


def _step_figure(chart: Chart, runs: Sequence[RunHistory]) -> Figure:
    data = []
    for run, color in zip(runs, cycle(COLORS), strict=False):
        values = run.column(chart.column) * chart.scale
        kept = keep_extremes(values, MAX_POINTS)
        if len(kept):
            line = {"type": "scatter", "mode": "lines", "name": run.name, "line": {"width": 1.5, "color": color}}
            data.append(line | {"x": _rounded(run.column("step")[kept]), "y": _rounded(values[kept])})
    layout = layout_of(f"{chart.title}, {chart.unit}" if chart.unit else chart.title, x_title="step")
    layout["yaxis"]["type"] = "log" if chart.is_log else "linear"
    return {"data": data, "layout": layout | {"showlegend": len(runs) > 1}}


def _heat_map(values: np.ndarray, **axes: list[Any]) -> Figure:
    rows, highest = [_rounded(row) for row in values], max(2.0, float(values.max()))
    return {"type": "heatmap", "z": rows, "colorscale": "Viridis", "zmin": 0, "zmax": highest} | axes


def layout_of(title: str, *, x_title: str, y_title: str = "") -> Figure:
    """The layout of a chart."""
    return {
        "title": {"text": title, "font": {"size": 14}},
        "xaxis": {"title": {"text": x_title}, "automargin": True},
        "yaxis": {"title": {"text": y_title}, "automargin": True},
        "height": 300,
        "margin": {"l": 50, "r": 20, "t": 60, "b": 45},
        "legend": {"orientation": "h", "y": -0.25},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
    }


def _buttons(buttons: list[Figure], x: float) -> Figure:
    place = {"direction": "left", "x": x, "xanchor": "left", "y": 1.16, "yanchor": "top"}
    return {"type": "buttons", "buttons": buttons} | place


def _rounded(values: np.ndarray) -> list[float | None]:
    """Six significant digits, or the whole number: what a screen shows, and half the bytes. None for NaN."""
    return [
        None if not np.isfinite(value) else float(f"{value:.6g}") if abs(value) < 1e6 else round(value)
        for value in values.tolist()
    ]


def keep_extremes(values: np.ndarray, max_points: int) -> np.ndarray:
    """The indices to draw: of each of equal bins the first, the smallest, the largest and the last finite value.

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
    for part in np.array_split(present, max_points // 4):
        low, high = part[np.argmin(values[part])], part[np.argmax(values[part])]
        kept += sorted({int(part[0]), int(low), int(high), int(part[-1])})
    return np.array(kept)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """An exponential moving average whose weights fall to 1/e within `window` values; NaN is passed over.

    >>> smooth(np.array([1.0, 1.0, 1.0]), 10).tolist()
    [1.0, 1.0, 1.0]
    """
    decay = np.exp(-1.0 / max(1, window))
    out, total, weight = np.empty(len(values)), 0.0, 0.0
    for i, value in enumerate(values):
        if np.isfinite(value):
            total, weight = decay * total + value, decay * weight + 1.0
        out[i] = total / weight if weight else np.nan
    return out
