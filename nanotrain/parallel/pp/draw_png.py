"""PNG drawings of schedules: one row per rank, one box per action; later stages of a rank are darker."""

from pathlib import Path
from typing import BinaryIO

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from nanotrain.errors import EnvironmentFault
from nanotrain.parallel.pp.actions import ActionKind
from nanotrain.parallel.pp.simulate import Timeline

STYLES = {
    ActionKind.forward: ("#8ecae6", "F forward"),
    ActionKind.full_backward: ("#95d5b2", "B full backward"),
    ActionKind.backward_input: ("#95d5b2", "I backward for the input"),
    ActionKind.backward_weight: ("#ffd166", "W backward for the weights"),
}
MAX_INCHES = 60.0
READABLE_INCHES, MAX_SCALE = 16.0, 2.0  # the width up to which text of 8 points is readable; texts grow beyond it


def save_png(timeline: Timeline, path: Path | BinaryIO, *, title: str) -> None:
    """Draw a timeline to a PNG file, by path or open.

    Raises:
        EnvironmentFault: the file cannot be written.
    """
    try:
        draw_figure(timeline, title=title).savefig(path, format="png", dpi=120, bbox_inches="tight")
    except OSError as error:
        raise EnvironmentFault(
            f"{path} cannot be written", why=error.strerror or str(error), fix="choose another file for --png"
        ) from error


def draw_figure(timeline: Timeline, *, title: str) -> Figure:
    """Draw a timeline with a legend below it."""
    num_ranks = len(timeline.spans)
    num_stages = 1 + max(span.action.stage for spans in timeline.spans for span in spans) // num_ranks
    width = min(MAX_INCHES, 2 + timeline.duration * 0.3)
    scale = min(MAX_SCALE, max(1.0, width / READABLE_INCHES))  # a wide picture is seen smaller
    figure = Figure(figsize=(width, 1.2 + num_ranks * 0.4))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for rank, spans in enumerate(timeline.spans):
        for span in spans:
            shade = 1 - 0.45 * (span.action.stage // num_ranks) / max(1, num_stages - 1)
            color = tuple(channel * shade for channel in to_rgb(STYLES[span.action.kind][0]))
            axes.barh(rank, span.end - span.start, left=span.start, height=0.9, color=color, edgecolor="white")
            middle = (span.start + span.end) / 2
            ink = "black" if shade > 0.75 else "white"
            axes.text(middle, rank, str(span.action.microbatch), ha="center", va="center", fontsize=7, color=ink)
    kinds = [kind for kind in ActionKind if any(s.action.kind is kind for spans in timeline.spans for s in spans)]
    for kind in kinds:
        axes.barh(0, 0, color=STYLES[kind][0], label=STYLES[kind][1])
    if num_stages > 1:
        axes.barh(0, 0, color="gray", label="the darker, the later the virtual stage")
    # measured in font sizes, so that the distance does not grow with the ranks
    columns = {"ncols": len(kinds) + (num_stages > 1), "columnspacing": 1.2, "borderaxespad": 4.5}
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0), frameon=False, fontsize=8 * scale, **columns)
    axes.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
    axes.tick_params(labelsize=8 * scale)
    axes.invert_yaxis()
    axes.set_xlim(0, timeline.duration)
    axes.set_xlabel("time, one forward of a stage = 1; digits: microbatches", fontsize=8 * scale)
    axes.set_title(f"{title}; bubble {timeline.bubble_fraction:.1%}", fontsize=10 * scale)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure
