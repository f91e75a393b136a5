"""The overlap timeline of a profiled step, as a table, a picture and a chart.

find_traces       the traces of a run folder
Timeline          a step of several ranks
save / load       `profile/timeline.json`, which `nanotrain report` draws
save_png          the picture

rank 0  compute        ################  ##########
        communication      ----------====               - hidden behind compute, = exposed
        copies         #                          #
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nanotrain.errors import EnvironmentFault
from nanotrain.report.figures import layout_of
from nanotrain.report.trace import RankStep, Spans, length, read_step
from nanotrain.runs.files import disk_errors, require_no_link, write_text
from nanotrain.untrusted import parse_json, read_file, whole_number

MAX_TIMELINE_BYTES = 1 << 24  # 8 ranks with 6,000 bars each have 2 MB
MAX_RANKS = 8  # drawn where --ranks does not choose
# bars of a lane in a picture, at most; shorter gaps are closed in it, never in the numbers
RESOLUTION = 1500
COLORS = {"compute": "#4f7cac", "hidden": "#95c9a8", "exposed": "#d1495b", "copies": "#e9b872"}
LEGEND = {
    "compute": "compute",
    "hidden": "communication hidden behind compute",
    "exposed": "communication exposed",
    "copies": "copies",
}
LANES = {"compute": ("compute",), "communication": ("hidden", "exposed"), "copies": ("copies",)}
_TRACE = re.compile(r"step-(\d{8})-rank-(\d{5,})\.json")


@dataclass(frozen=True)
class Lanes:
    """The step of one rank as it is drawn. Times are milliseconds from the start of the step."""

    rank: int
    step: int
    duration_ms: float
    total_ms: dict[str, float]  # compute, hidden, exposed, copies, idle
    spans_ms: dict[str, list[list[float]]]  # compute, hidden, exposed, copies: (start, end) to draw


@dataclass(frozen=True)
class Timeline:
    """One step of some ranks of a run, by rank."""

    ranks: tuple[Lanes, ...]
    num_ranks: int  # that have a trace
    on_device: bool

    @property
    def title(self) -> str:
        """The step, and the share of hidden communication."""
        share = hidden_share(self.ranks)
        step = f"step {self.ranks[0].step}" if self.ranks[0].step else "trace"
        if share is None:
            return f"{step}: no communication"
        bound = "" if self.on_device else " (gloo: at most)"
        return f"{step}: {share:.0%} of communication hidden behind compute{bound}"


def profile_folder(folder: Path) -> Path:
    """The folder of the profiles of a run, into which `timeline` writes too.

    Raises:
        StorageFault: it is a symbolic link.
    """
    profiles = folder / "profile"
    require_no_link(profiles)
    return profiles


def find_traces(folder: Path, *, step: int | None = None) -> dict[int, Path]:
    """The traces of a run folder by rank.

    They are of the first profile that ends at `step` or later, or of the newest.

    Raises:
        EnvironmentFault: there are none.
    """
    profiles: dict[int, dict[int, Path]] = {}
    for path in sorted((folder / "profile").glob("step-*.json")):
        if match := _TRACE.fullmatch(path.name):
            profiles.setdefault(int(match[1]), {})[int(match[2])] = path
    if not profiles:
        why = "profile/ has no step-NNNNNNNN-rank-NNNNN.json"
        if not folder.is_dir():
            why = "there is no such folder"
        raise EnvironmentFault(
            f"there is no profile in {folder}",
            why=why,
            fix="train with --profile; --profile-step-start and --profile-step-end choose the "
            "steps",
        )
    later = [last for last in profiles if step is not None and last >= step]
    return profiles[min(later, default=max(profiles))]


def read_timeline(folder: Path, *, step: int | None = None, ranks: Sequence[int] = ()) -> Timeline:
    """Read the traces of a run.

    Args:
        folder: run folder.
        step: number of the step; None: the last one that was profiled.
        ranks: ranks to read; empty: the first MAX_RANKS.

    Raises:
        EnvironmentFault: no traces, a trace that cannot be read, a step or rank that was not
            profiled.
    """
    traces = find_traces(folder, step=step)
    absent = [rank for rank in ranks if rank not in traces]
    if absent:
        shown = [str(rank) for rank in sorted(traces)[:16]]
        if len(traces) > 16:
            shown.append("...")
        raise EnvironmentFault(
            f"rank {absent[0]} has no trace",
            why=f"ranks with one: {', '.join(shown)}",
            fix="change --ranks",
        )
    chosen = sorted(set(ranks)) or sorted(traces)[:MAX_RANKS]
    steps = [read_step(traces[rank], rank=rank, step=step) for rank in chosen]
    on_device = any(rank_step.on_device for rank_step in steps)
    return Timeline(tuple(map(_lanes, steps)), len(traces), on_device)


def save(timeline: Timeline, folder: Path) -> None:
    """Write `profile/timeline.json` into a run folder.

    Raises:
        EnvironmentFault: it cannot be written.
    """
    rows = [vars(lanes) for lanes in timeline.ranks]
    content = {"num_ranks": timeline.num_ranks, "on_device": timeline.on_device, "ranks": rows}
    text = json.dumps(content, separators=(",", ":"))
    write_text(profile_folder(folder) / "timeline.json", f"{text}\n")


def load(folder: Path) -> Timeline | None:
    """The timeline that `save` wrote; None if there is none or it is damaged."""
    try:
        path = folder / "profile" / "timeline.json"
        content = parse_json(read_file(path, follows_links=False, most=MAX_TIMELINE_BYTES))
        ranks = tuple(
            Lanes(whole_number(row.pop("rank"), "rank"), **row) for row in content["ranks"]
        )
        timeline = Timeline(ranks, int(content["num_ranks"]), bool(content["on_device"]))
        # every value that is drawn is there and is a number
        json.dumps(figure_of(timeline, name=""), allow_nan=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError):
        return None
    return timeline


def rows_of(timeline: Timeline) -> list[list[str]]:
    """The table: a header, then one row per rank, in milliseconds."""
    header = ["rank", "step ms", "compute", "communication", "hidden", "exposed", "copies", "idle"]
    rows = []
    for lanes in timeline.ranks:
        total = lanes.total_ms
        share = hidden_share([lanes])
        row = [
            str(lanes.rank),
            _ms(lanes.duration_ms),
            _ms(total["compute"]),
            _ms(total["hidden"] + total["exposed"]),
            "-" if share is None else f"{share:.0%}",
            _ms(total["exposed"]),
            _ms(total["copies"]),
            _ms(total["idle"]),
        ]
        rows.append(row)
    return [header, *rows]


def save_png(timeline: Timeline, path: Path) -> None:
    """Draw three lanes per rank.

    Raises:
        EnvironmentFault: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # half a second to import
    from matplotlib.figure import Figure

    height = 0.9 + 0.27 * sum(len(LANES) + 1 for _ in timeline.ranks)
    figure = Figure(figsize=(10.5, height))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ticks: dict[float, str] = {}
    for index, lanes in enumerate(timeline.ranks):
        for row, (lane, kinds) in enumerate(LANES.items()):
            y = index * (len(LANES) + 1) + row
            ticks[y] = f"rank {lanes.rank}  {lane}" if row == 0 else lane
            for kind in kinds:
                bars = [(start, end - start) for start, end in lanes.spans_ms[kind]]
                axes.broken_barh(bars, (y - 0.42, 0.84), facecolors=COLORS[kind], linewidth=0)
    for kind, label in LEGEND.items():
        axes.barh(0, 0, color=COLORS[kind], label=label)
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, max(lanes.duration_ms for lanes in timeline.ranks))
    axes.set_xlabel("milliseconds from the start of the step of each rank", fontsize=8)
    axes.set_title(timeline.title, fontsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        ncols=4,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        frameon=False,
        fontsize=8,
    )
    with disk_errors(path, fix="choose another file with --png"):
        figure.savefig(
            path, format="png", dpi=130, bbox_inches="tight", metadata={"Software": None}
        )


def figure_of(timeline: Timeline, *, name: str) -> dict[str, Any]:
    """The chart of a report, in plotly's JSON form."""
    rows = []
    for lanes in timeline.ranks:
        rows += [f"rank {lanes.rank} {lane}" for lane in LANES]
    x_title = "ms from the start of the step"
    layout = layout_of(f"{name}, {timeline.title}", unit="ms", x_title=x_title)
    layout |= {"barmode": "overlay", "bargap": 0.15, "height": 150 + 24 * len(rows)}
    layout["yaxis"] |= {"categoryorder": "array", "categoryarray": rows[::-1]}
    return {"data": [_bars(timeline, kind) for kind in LEGEND], "layout": layout}


def _bars(timeline: Timeline, kind: str) -> dict[str, Any]:
    """The bars of one color."""
    lane = next(lane for lane, kinds in LANES.items() if kind in kinds)
    rows = []
    starts = []
    durations = []
    for lanes in timeline.ranks:
        for start, end in lanes.spans_ms[kind]:
            rows.append(f"rank {lanes.rank} {lane}")
            starts.append(round(start, 3))
            durations.append(round(end - start, 3))
    return {
        "type": "bar",
        "orientation": "h",
        "name": LEGEND[kind],
        "marker": {"color": COLORS[kind], "line": {"width": 0}},
        "y": rows,
        "base": starts,
        "x": durations,
    }


def _lanes(step: RankStep) -> Lanes:
    """The drawable form of a step: totals and spans by kind, in milliseconds."""
    total_ms = {}
    spans_ms = {}
    for kind in LEGEND:
        spans = getattr(step, kind)
        total_ms[kind] = length(spans) / 1000
        spans_ms[kind] = _close_small_gaps(spans, step.duration_us / RESOLUTION)
    total_ms["idle"] = step.idle_us / 1000
    return Lanes(step.rank, step.step, step.duration_us / 1000, total_ms, spans_ms)


def _close_small_gaps(spans: Spans, gap: float) -> list[list[float]]:
    """Spans in ms, at most RESOLUTION of them: gaps below `gap` are closed."""
    if not len(spans):
        return []
    opens = np.append(True, spans[1:, 0] - spans[:-1, 1] > gap)
    closes = np.append(opens[1:], True)
    merged = np.stack([spans[opens, 0], spans[closes, 1]], axis=1)
    rounded: list[list[float]] = np.round(merged / 1000, 4).tolist()
    return rounded


def hidden_share(ranks: Sequence[Lanes]) -> float | None:
    """Share of the communication time of some ranks that compute hides; None without any."""
    hidden = sum(lanes.total_ms["hidden"] for lanes in ranks)
    exposed = sum(lanes.total_ms["exposed"] for lanes in ranks)
    return hidden / (hidden + exposed) if hidden + exposed else None


def _ms(value: float) -> str:
    return f"{value:,.1f}" if value < 10_000 else f"{value:,.0f}"
