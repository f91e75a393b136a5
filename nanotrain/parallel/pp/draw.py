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
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from nanotrain.errors import EnvironmentFault, ScheduleError
from nanotrain.parallel.pp.actions import Action, ActionKind, PipelineShape
from nanotrain.parallel.pp.schedules import SCHEDULES
from nanotrain.parallel.pp.simulate import Span, Timeline, simulate
from nanotrain.quantities import count_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 110  # characters per row
MAX_CELLS = 20_000  # stages x microbatches of a drawing; this many take a second to draw
MAX_INCHES = 60.0
READABLE_INCHES = 16.0  # width up to which text of 8 points is readable; texts grow beyond it
MAX_SCALE = 2.0  # largest scale of texts in a wide picture


class Style(NamedTuple):
    """Drawing style of one kind of action."""

    fill: str  # character of the bar in a text
    color: str  # color of the bar in a picture
    legend: str


STYLES = {
    ActionKind.forward: Style(".", "#8ecae6", "F forward"),
    ActionKind.full_backward: Style("=", "#95d5b2", "B full backward"),
    ActionKind.backward_input: Style("=", "#95d5b2", "I backward for the input"),
    ActionKind.backward_weight: Style("-", "#ffd166", "W backward for the weights"),
}


def draw_schedule(name: str, shape: PipelineShape, *, png: Path | None = None) -> str:
    """Draw a schedule of `SCHEDULES` as text, and as a picture to `png`.

    A backward takes twice as long as a forward.

    Raises:
        ScheduleError: a number of stages that the schedule does not support, or more than can be
            drawn.
        EnvironmentFault: the file cannot be written.
    """
    if shape.num_stages * shape.num_microbatches > MAX_CELLS:
        size = f"{shape.num_stages:,} stages x {shape.num_microbatches:,} microbatches"
        raise ScheduleError(
            f"{size} cannot be drawn",
            why=f"a drawing has at most {MAX_CELLS:,} of both together",
            fix="lower --num-microbatches or --pipeline-model-parallel-size",
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
    names = labels(timeline)
    shortest = min(span.end - span.start for span in all_spans(timeline))
    column = 1 + max(map(len, names.values()))
    scale = column / shortest  # characters per unit of time
    num_columns = round(timeline.duration * scale / column)

    ruler = "".join(f"{index * shortest:g}".ljust(column) for index in range(num_columns + 1))
    rows = {"time": ruler}
    for rank, spans in enumerate(timeline.spans):
        row = ""
        for span in spans:
            start = round(span.start * scale)
            end = round(span.end * scale)
            row = row.ljust(start) + names[span.action].ljust(end - start, _style(span).fill)
        rows[f"rank {rank}"] = row

    margin = 2 + max(map(len, rows))
    per_line = max(1, (width - margin) // column) * column
    blocks = []
    for at in range(0, max(num_columns, 1) * column, per_line):
        lines = [head.ljust(margin) + row[at : at + per_line] for head, row in rows.items()]
        blocks.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join(blocks)


def all_spans(timeline: Timeline) -> list[Span]:
    """The spans of all ranks, one rank after the other."""
    return [span for spans in timeline.spans for span in spans]


def _style(span: Span) -> Style:
    return STYLES[span.action.kind]


def labels(timeline: Timeline) -> dict[Action, str]:
    """Kind and microbatch of every action, and a letter for the stage where a rank has several.

    >>> from nanotrain.parallel.pp.schedules import interleaved
    >>> timeline = simulate(interleaved(PipelineShape(2, 2, 1)))
    >>> list(labels(timeline).values())
    ['F0a', 'F0b', 'B0b', 'B0a', 'F0a', 'F0b', 'B0b', 'B0a']
    """
    actions = [span.action for span in all_spans(timeline)]
    num_ranks = len(timeline.spans)
    has_letters = any(action.stage >= num_ranks for action in actions)
    names = {}
    for action in actions:
        name = f"{action.kind.value}{action.microbatch}"
        if has_letters:
            name += chr(ord("a") + action.stage // num_ranks)
        names[action] = name
    return names


def describe(timeline: Timeline) -> str:
    """Duration, bubble and memory of a timeline of `UNIT_COSTS`."""
    bubble = Fraction(timeline.bubble_fraction).limit_denominator(10**6)
    share = f"{bubble} = {float(bubble):.1%}" if bubble else f"{bubble}"
    in_flight = " ".join(map(str, timeline.peak_in_flight))
    until_wgrad = " ".join(map(str, timeline.peak_until_wgrad))
    is_split = in_flight != until_wgrad  # whether backwards are I and W
    costs = "forward 1, backward 2"
    first_backward = "B"
    if is_split:
        costs += " (1 for I and 1 for W)"
        first_backward = "I"
    peaks = "peak microbatches between F and"
    lines = [
        f"duration   {timeline.duration:g}   ({costs})",
        f"bubble     {share} of the time of all ranks",
        f"in flight  {in_flight}   {peaks} {first_backward}, per rank",
    ]
    if is_split:
        lines.append(f"until W    {until_wgrad}   {peaks} W, per rank")
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
    from matplotlib.figure import Figure

    num_ranks = len(timeline.spans)
    num_stages = 1 + max(span.action.stage for span in all_spans(timeline)) // num_ranks
    width = min(MAX_INCHES, 2 + timeline.duration * 0.3)
    scale = min(MAX_SCALE, max(1.0, width / READABLE_INCHES))  # a wide picture is seen smaller
    figure = Figure(figsize=(width, 1.2 + num_ranks * 0.4))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for rank, spans in enumerate(timeline.spans):
        for span in spans:
            virtual_stage = span.action.stage // num_ranks
            shade = 1 - 0.45 * virtual_stage / max(1, num_stages - 1)
            _draw_bar(axes, span, rank=rank, shade=shade)
    used_kinds = {span.action.kind for span in all_spans(timeline)}
    styles = [STYLES[kind] for kind in ActionKind if kind in used_kinds]
    if num_stages > 1:
        styles.append(Style("", "gray", "the darker, the later the virtual stage"))
    for style in styles:
        axes.barh(0, 0, color=style.color, label=style.legend)
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, 0),
        frameon=False,
        fontsize=8 * scale,
        ncols=len(styles),
        columnspacing=1.2,
        borderaxespad=4.5,  # in font sizes, so that the distance does not grow with the ranks
    )
    axes.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
    axes.tick_params(labelsize=8 * scale)
    axes.invert_yaxis()
    axes.set_xlim(0, timeline.duration)
    axes.set_xlabel("time, one forward of a stage = 1; digits: microbatches", fontsize=8 * scale)
    axes.set_title(f"{title}; bubble {timeline.bubble_fraction:.1%}", fontsize=10 * scale)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


def _draw_bar(axes: "Axes", span: Span, *, rank: int, shade: float) -> None:
    """Draw an action as a bar with the number of its microbatch."""
    from matplotlib.colors import to_rgb

    color = tuple(channel * shade for channel in to_rgb(_style(span).color))
    duration = span.end - span.start
    axes.barh(rank, duration, left=span.start, height=0.9, color=color, edgecolor="white")
    axes.text(
        (span.start + span.end) / 2,
        rank,
        str(span.action.microbatch),
        ha="center",
        va="center",
        fontsize=7,
        color="black" if shade > 0.75 else "white",
    )
