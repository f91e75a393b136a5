"""Drawings of schedules as text and PNG: one row per rank, time from left to right.

    draw_schedule     the output of `nanotrain topology --schedule`
    draw_timeline     the rows, wrapped at a fixed width
    describe          duration, bubble and memory
    save_png          a picture; later stages of a rank are darker

`F0` is the forward of microbatch 0, `B` a full backward, `I` and `W` one for the input and for the
weights; `F0b` is on the rank's second stage.
"""

from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from nanotrain.errors import EnvironmentFault, ScheduleError
from nanotrain.parallel.pp.actions import Action, ActionKind, PipelineShape
from nanotrain.parallel.pp.schedules import SCHEDULES
from nanotrain.parallel.pp.simulate import Timeline, simulate
from nanotrain.quantities import count_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 110  # characters per row
MAX_CELLS = 20_000  # stages x microbatches of a drawing; this many take a second to draw
MAX_INCHES = 60.0
# the width up to which text of 8 points is readable; texts grow beyond it
READABLE_INCHES, MAX_SCALE = 16.0, 2.0
# by kind: fill of the bars in a text, color and legend in a picture
STYLES = {
    ActionKind.forward: (".", "#8ecae6", "F forward"),
    ActionKind.full_backward: ("=", "#95d5b2", "B full backward"),
    ActionKind.backward_input: ("=", "#95d5b2", "I backward for the input"),
    ActionKind.backward_weight: ("-", "#ffd166", "W backward for the weights"),
}


def draw_schedule(name: str, shape: PipelineShape, *, png: Path | None = None) -> str:
    """Draw a schedule of `SCHEDULES`, with backwards that take twice as long as forwards; `png` as
    a picture too.

    Raises:
        ScheduleError: a number of stages that the schedule does not support, or more than can be
            drawn.
        EnvironmentFault: the file cannot be written.
    """
    if shape.num_stages * shape.num_microbatches > MAX_CELLS:
        what = (
            f"{shape.num_stages:,} stages x {shape.num_microbatches:,} microbatches cannot be drawn"
        )
        fix = "lower --num-microbatches or --pipeline-model-parallel-size"
        raise ScheduleError(
            what, why=f"a drawing has at most {MAX_CELLS:,} of both together", fix=fix
        )
    timeline = simulate(SCHEDULES[name](shape))
    title = f"{name}: {count_of(shape.num_ranks, 'rank')}, {count_of(shape.num_stages, 'stage')}, "
    title += count_of(shape.num_microbatches, "microbatch")
    parts = [title, draw_timeline(timeline), describe(timeline)]
    if png is not None:
        save_png(timeline, png, title=title)
        parts.append(f"written to {png}")
    return "\n\n".join(parts)


def draw_timeline(timeline: Timeline, *, width: int = WIDTH) -> str:
    """The rows of a timeline; a column is at least as wide as the label of the shortest action.

    >>> from nanotrain.parallel.pp.schedules import one_f_one_b
    >>> print(draw_timeline(simulate(one_f_one_b(PipelineShape(2, 1, 2)))))
    time    0  1  2  3  4  5  6  7  8  9
    rank 0  F0.F1.      B0====   B1====
    rank 1     F0.B0====F1.B1====
    """
    spans, names = [span for row in timeline.spans for span in row], labels(timeline)
    shortest = min(span.end - span.start for span in spans)
    column = 1 + max(map(len, names.values()))
    scale = column / shortest

    margin = len(f"rank {len(timeline.spans) - 1}") + 2
    num_columns = round(timeline.duration * scale / column)
    rows = [""] * len(timeline.spans)
    for rank, of_rank in enumerate(timeline.spans):
        for span in of_rank:
            start, end = round(span.start * scale), round(span.end * scale)
            bar = names[span.action].ljust(end - start, STYLES[span.action.kind][0])
            rows[rank] = rows[rank].ljust(start) + bar
    ruler = "".join(f"{index * shortest:g}".ljust(column) for index in range(num_columns + 1))
    lines = ["time".ljust(margin), *(f"rank {rank}".ljust(margin) for rank in range(len(rows)))]
    per_line = max(1, (width - margin) // column) * column
    blocks = [
        "\n".join(
            (head + row[at : at + per_line]).rstrip()
            for head, row in zip(lines, [ruler, *rows], strict=True)
        )
        for at in range(0, max(num_columns, 1) * column, per_line)
    ]
    return "\n\n".join(blocks)


def labels(timeline: Timeline) -> dict[Action, str]:
    """Kind and microbatch of every action, and a letter for the stage where a rank has several.

    >>> from nanotrain.parallel.pp.schedules import interleaved
    >>> timeline = simulate(interleaved(PipelineShape(2, 2, 1)))
    >>> list(labels(timeline).values())
    ['F0a', 'F0b', 'B0b', 'B0a', 'F0a', 'F0b', 'B0b', 'B0a']
    """
    actions, num_ranks = (
        [span.action for spans in timeline.spans for span in spans],
        len(timeline.spans),
    )
    has_letters = any(action.stage >= num_ranks for action in actions)
    letters = {
        action: chr(ord("a") + action.stage // num_ranks) if has_letters else ""
        for action in actions
    }
    return {
        action: f"{action.kind.value}{action.microbatch}{letters[action]}" for action in actions
    }


def describe(timeline: Timeline) -> str:
    """Duration, bubble and memory of a timeline of `UNIT_COSTS`."""
    bubble = Fraction(timeline.bubble_fraction).limit_denominator(10**6)
    in_flight, until_wgrad = (
        " ".join(map(str, n)) for n in (timeline.peak_in_flight, timeline.peak_until_wgrad)
    )
    is_split = in_flight != until_wgrad
    costs = "forward 1, backward 2" + (" (1 for I and 1 for W)" if is_split else "")
    lines = [
        f"duration   {timeline.duration:g}   ({costs})",
        f"bubble     {bubble}"
        + (f" = {float(bubble):.1%}" if bubble else "")
        + " of the time of all ranks",
        f"in flight  {in_flight}   peak microbatches between F and {'I' if is_split else 'B'}, per rank",
    ]
    if is_split:
        lines.append(f"until W    {until_wgrad}   peak microbatches between F and W, per rank")
    return "\n".join(lines)


def save_png(timeline: Timeline, path: Path | BinaryIO, *, title: str) -> None:
    """Draw a timeline to a PNG file, by path or open.

    Raises:
        EnvironmentFault: the file cannot be written.
    """
    try:
        draw_figure(timeline, title=title).savefig(path, format="png", dpi=120, bbox_inches="tight")
    except OSError as error:
        raise EnvironmentFault(
            f"{path} cannot be written",
            why=error.strerror or str(error),
            fix="choose another file for --png",
        ) from error


def draw_figure(timeline: Timeline, *, title: str) -> "Figure":
    """Draw a timeline with a legend below it."""
    # matplotlib takes half a second to import
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure

    num_ranks = len(timeline.spans)
    num_stages = (
        1 + max(span.action.stage for spans in timeline.spans for span in spans) // num_ranks
    )
    width = min(MAX_INCHES, 2 + timeline.duration * 0.3)
    scale = min(MAX_SCALE, max(1.0, width / READABLE_INCHES))  # a wide picture is seen smaller
    figure = Figure(figsize=(width, 1.2 + num_ranks * 0.4))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for rank, spans in enumerate(timeline.spans):
        for span in spans:
            shade = 1 - 0.45 * (span.action.stage // num_ranks) / max(1, num_stages - 1)
            color = tuple(channel * shade for channel in to_rgb(STYLES[span.action.kind][1]))
            axes.barh(
                rank,
                span.end - span.start,
                left=span.start,
                height=0.9,
                color=color,
                edgecolor="white",
            )
            middle = (span.start + span.end) / 2
            ink = "black" if shade > 0.75 else "white"
            axes.text(
                middle,
                rank,
                str(span.action.microbatch),
                ha="center",
                va="center",
                fontsize=7,
                color=ink,
            )
    kinds = [
        kind
        for kind in ActionKind
        if any(s.action.kind is kind for spans in timeline.spans for s in spans)
    ]
    for kind in kinds:
        axes.barh(0, 0, color=STYLES[kind][1], label=STYLES[kind][2])
    if num_stages > 1:
        axes.barh(0, 0, color="gray", label="the darker, the later the virtual stage")
    # measured in font sizes, so that the distance does not grow with the ranks
    columns = {"ncols": len(kinds) + (num_stages > 1), "columnspacing": 1.2, "borderaxespad": 4.5}
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, 0), frameon=False, fontsize=8 * scale, **columns
    )
    axes.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
    axes.tick_params(labelsize=8 * scale)
    axes.invert_yaxis()
    axes.set_xlim(0, timeline.duration)
    axes.set_xlabel("time, one forward of a stage = 1; digits: microbatches", fontsize=8 * scale)
    axes.set_title(f"{title}; bubble {timeline.bubble_fraction:.1%}", fontsize=10 * scale)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure
