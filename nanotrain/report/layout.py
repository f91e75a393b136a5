"""The layout of a run as HTML: its ranks as a grid, its groups of several ranks, and its pipeline
schedule.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from io import BytesIO
from itertools import product

from nanotrain.config.parallel import ParallelConfig
from nanotrain.config.schedules import num_microbatches
from nanotrain.config.schema import KEYS, config_from_dict, nest
from nanotrain.errors import NanotrainError
from nanotrain.parallel.pp.actions import PipelineShape
from nanotrain.parallel.pp.draw import save_png
from nanotrain.parallel.pp.schedules import SCHEDULES, build_schedule
from nanotrain.parallel.pp.simulate import simulate
from nanotrain.report.history import RunHistory
from nanotrain.report.tables import html_table
from nanotrain.topology.grid import Grid
from nanotrain.topology.groups import Ranks
from nanotrain.topology.picture import GAP, ranks_text, shorten, used_groups
from nanotrain.topology.topology import Topology

MICROBATCHES_PER_RANK = 4  # a picture of more would not be legible; the rest repeats the middle
MAX_STAGES = 128  # of a picture
MAX_PER_AXIS = 8  # ranks of a grid
NUM_COLORS = 6  # of pipeline stages, in page.css


def layout_html(run: RunHistory) -> str:
    """Grid, groups and schedule; empty where the run folder does not have a layout of this version."""
    world_size, has_experts = (
        run.environment.get("world_size"),
        bool(run.config.get("model.moe.num_experts")),
    )
    if not isinstance(world_size, int):
        return ""
    known = {
        key: value
        for key, value in run.config.items()
        if key in KEYS and key.startswith(("parallel.", "train."))
    }
    try:
        config = config_from_dict(nest(known))
        parallel, train = config.parallel, config.train
        topology = Topology.of(parallel, world_size, has_experts=has_experts)
        html = rank_grid(topology.dense, title="ranks")
        if has_experts and topology.expert.sizes != topology.dense.sizes:
            html += rank_grid(topology.expert, title="ranks by expert")
        html += groups_table(topology, has_experts=has_experts)
        num_stages = (
            parallel.pipeline_model_parallel_size * parallel.num_virtual_stages_per_pipeline_rank
        )
        is_drawn = parallel.pipeline_model_parallel_size > 1 and num_stages <= MAX_STAGES
        if not is_drawn or parallel.pipeline_schedule not in SCHEDULES:
            return html
        count = num_microbatches(train, parallel.data_parallel_size(world_size))
        return html + _schedule(parallel, count, name=run.name)
    except NanotrainError:  # written by another version
        return ""


def rank_grid(grid: Grid, *, title: str) -> str:
    """A table of ranks: a row per pipeline stage and replica, a column per rank of a replica's
    stage.

    Where a stage of a replica is one rank, the columns are the replicas. Pipeline stages have
    colors. Axes of one rank are not named, and only the first and the last ranks of a long axis are
    drawn.
    """
    *across, replica = (axis for axis in grid.axes if axis != "pp")
    down = ["pp", replica]
    if all(grid.size(axis) == 1 for axis in across):
        across, down = [replica], ["pp", *across]
    columns = list(_positions(grid, across[::-1]))
    names = [title, *(_label(grid, column) for column in columns)]
    lines = [f"<tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>"]
    for row in _positions(grid, down):
        cells = "".join(_cell(grid, row | column) for column in columns)
        lines.append(f"<tr><th>{_label(grid, row)}</th>{cells}</tr>")
    return f'<div class="scroll"><table class="ranks">{"".join(lines)}</table></div>'


def groups_table(topology: Topology, *, has_experts: bool) -> str:
    """The groups of several ranks, equal ones in one row; empty where every group is a single rank."""
    names_of: dict[tuple[Ranks, ...], list[str]] = {}
    for name in used_groups(has_experts):
        names_of.setdefault(topology.groups_of(name), []).append(name)
    rows = [
        (", ".join(names), f"{len(groups)} x {len(groups[0])}", ranks_text(groups))
        for groups, names in names_of.items()
        if len(groups[0]) > 1
    ]
    return html_table(("groups", "number x ranks", "ranks"), rows) if rows else ""


def _cell(grid: Grid, at: Mapping[str, int | None]) -> str:
    known = {axis: coordinate for axis, coordinate in at.items() if coordinate is not None}
    if len(known) < len(at):
        return f"<td>{GAP}</td>"
    return f'<td class="stage{known["pp"] % NUM_COLORS}" title="{_label(grid, at)}">{grid.rank(known)}</td>'


def _positions(grid: Grid, axes: Sequence[str]) -> Iterator[dict[str, int | None]]:
    """Coordinates along axes, the slowest first; None stands for those that are left out."""
    for each in product(*(shorten(range(grid.size(axis)), MAX_PER_AXIS) for axis in axes)):
        yield dict(zip(axes, each, strict=True))


def _label(grid: Grid, at: Mapping[str, int | None]) -> str:
    """The coordinates along the axes of several ranks."""
    return " ".join(
        GAP if c is None else f"{axis}{c}" for axis, c in at.items() if grid.size(axis) > 1
    )


def _schedule(parallel: ParallelConfig, count: int, *, name: str) -> str:
    shape = PipelineShape.of(
        parallel, min(count, MICROBATCHES_PER_RANK * parallel.pipeline_model_parallel_size)
    )
    title = f"{parallel.pipeline_schedule}, {shape.num_microbatches} of {count} microbatches"
    picture = BytesIO()
    save_png(simulate(build_schedule(parallel.pipeline_schedule, shape)), picture, title=title)
    encoded = base64.b64encode(picture.getvalue()).decode()
    return f'<img alt="pipeline schedule of {escape(name)}" src="data:image/png;base64,{encoded}">'
