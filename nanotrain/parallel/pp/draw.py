"""Text drawings of schedules: one row per rank, time from left to right, wrapped at a fixed width.

    draw_schedule     the output of `nanotrain topology --schedule`
    draw_timeline     the rows
    describe          duration, bubble and memory

`F0` is the forward of microbatch 0, `B` a full backward, `I` and `W` one for the input and for the weights; `F0b` is on
the rank's second stage.
"""

from fractions import Fraction
from pathlib import Path

from nanotrain.errors import ScheduleError
from nanotrain.parallel.pp.actions import Action, ActionKind, PipelineShape
from nanotrain.parallel.pp.schedules import SCHEDULES
from nanotrain.parallel.pp.simulate import UNIT_COSTS, Costs, Timeline, simulate

WIDTH = 110  # characters per row
MAX_CELLS = 20_000  # stages x microbatches of a drawing; this many take a second to draw
FILL = {
    ActionKind.forward: ".",
    ActionKind.full_backward: "=",
    ActionKind.backward_input: "=",
    ActionKind.backward_weight: "-",
}


def draw_schedule(name: str, shape: PipelineShape, *, png: Path | None = None) -> str:
    """Draw a schedule of `SCHEDULES`, with backwards that take twice as long as forwards; `png` as a picture too.

    Raises:
        ScheduleError: a number of stages that the schedule does not support, or more than can be drawn.
        EnvironmentFault: the file cannot be written.
    """
    if shape.num_stages * shape.num_microbatches > MAX_CELLS:
        what = f"{shape.num_stages:,} stages x {shape.num_microbatches:,} microbatches cannot be drawn"
        fix = "lower --num-microbatches or --pipeline-model-parallel-size"
        raise ScheduleError(what, why=f"a drawing has at most {MAX_CELLS:,} of both together", fix=fix)
    timeline = simulate(SCHEDULES[name](shape))
    title = f"{name}: {_counted(shape.num_ranks, 'rank')}, {_counted(shape.num_stages, 'stage')}, "
    title += _counted(shape.num_microbatches, "microbatch", plural="es")
    parts = [title, draw_timeline(timeline), describe(timeline)]
    if png is not None:
        from nanotrain.parallel.pp.draw_png import save_png  # matplotlib takes half a second to import

        save_png(timeline, png, title=title)
        parts.append(f"written to {png}")
    return "\n\n".join(parts)


def draw_timeline(timeline: Timeline, *, width: int = WIDTH) -> str:
    """The rows of a timeline; a column is at least as wide as the label of the shortest action.

    >>> from nanotrain.parallel.pp.one_f_one_b import one_f_one_b
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
            bar = names[span.action].ljust(end - start, FILL[span.action.kind])
            rows[rank] = rows[rank].ljust(start) + bar
    ruler = "".join(f"{index * shortest:g}".ljust(column) for index in range(num_columns + 1))
    lines = ["time".ljust(margin), *(f"rank {rank}".ljust(margin) for rank in range(len(rows)))]
    per_line = max(1, (width - margin) // column) * column
    blocks = [
        "\n".join((head + row[at : at + per_line]).rstrip() for head, row in zip(lines, [ruler, *rows], strict=True))
        for at in range(0, max(num_columns, 1) * column, per_line)
    ]
    return "\n\n".join(blocks)


def labels(timeline: Timeline) -> dict[Action, str]:
    """Kind and microbatch of every action, and a letter for the stage where a rank has several.

    >>> from nanotrain.parallel.pp.interleaved import interleaved
    >>> timeline = simulate(interleaved(PipelineShape(2, 2, 1)))
    >>> list(labels(timeline).values())
    ['F0a', 'F0b', 'B0b', 'B0a', 'F0a', 'F0b', 'B0b', 'B0a']
    """
    actions, num_ranks = [span.action for spans in timeline.spans for span in spans], len(timeline.spans)
    has_letters = any(action.stage >= num_ranks for action in actions)
    letters = {action: chr(ord("a") + action.stage // num_ranks) if has_letters else "" for action in actions}
    return {action: f"{action.kind.value}{action.microbatch}{letters[action]}" for action in actions}


def describe(timeline: Timeline, *, costs: Costs = UNIT_COSTS) -> str:
    """Duration, bubble and memory of a timeline."""
    bubble = Fraction(timeline.bubble_fraction).limit_denominator(10**6)
    is_split = timeline.peak_until_wgrad != timeline.peak_in_flight
    forward, backward = f"forward {costs.forward:g}", f"backward {costs.backward:g}"
    if is_split:
        backward += f" ({costs.backward - costs.weight:g} for I and {costs.weight:g} for W)"
    lines = [
        f"duration   {timeline.duration:g}   ({forward}, {backward})",
        f"bubble     {bubble}" + (f" = {float(bubble):.1%}" if bubble else "") + " of the time of all ranks",
        f"in flight  {_listed(timeline.peak_in_flight)}   peak microbatches between F and {'I' if is_split else 'B'}, "
        "per rank",
    ]
    if is_split:
        lines.append(f"until W    {_listed(timeline.peak_until_wgrad)}   peak microbatches between F and W, per rank")
    return "\n".join(lines)


def _listed(numbers: tuple[int, ...]) -> str:
    return " ".join(map(str, numbers))


def _counted(count: int, noun: str, *, plural: str = "s") -> str:
    return f"{count} {noun}{plural if count != 1 else ''}"
