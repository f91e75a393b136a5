"""The layout of a run as HTML: a grid of ranks, groups of several ranks, the pipeline schedule."""

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
from nanotrain.topology.grid_drawing import GAP, shorten
from nanotrain.topology.groups import Ranks
from nanotrain.topology.picture import ranks_text, used_groups
from nanotrain.topology.topology import Topology

MICROBATCHES_PER_RANK = 4  # a picture of more would not be legible; the rest repeats the middle
MAX_STAGES = 128  # stages in a picture
MAX_PER_AXIS = 8  # ranks of a grid
# the settings that a layout follows from
LAYOUT_KEYS = frozenset(key for key in KEYS if key.startswith(("parallel.", "train.")))
NUM_COLORS = 6  # colors of pipeline stages in page.css


def layout_html(run: RunHistory) -> str:
    """Grid, groups and schedule; empty where the run folder has no layout of this version."""
    world_size = run.environment.get("world_size")
    if not isinstance(world_size, int):
        return ""
    has_experts = bool(run.config.get("model.moe.num_experts"))
    known = {key: value for key, value in run.config.items() if key in LAYOUT_KEYS}
    try:
        config = config_from_dict(nest(known))
        topology = Topology.of(config.parallel, world_size, has_experts=has_experts)
        html = rank_grid(topology.dense, title="ranks")
        if has_experts and topology.expert.sizes != topology.dense.sizes:
            html += rank_grid(topology.expert, title="ranks by expert")
        html += groups_table(topology, has_experts=has_experts)
        if is_drawn(config.parallel):
            dp = config.parallel.data_parallel_size(world_size)
            count = num_microbatches(config.train, dp)
            html += schedule_html(config.parallel, count, name=run.name)
    except NanotrainError:  # written by another version
        return ""
    return html


def is_drawn(parallel: ParallelConfig) -> bool:
    """Whether a layout has a pipeline schedule that can be drawn."""
    pp = parallel.pipeline_model_parallel_size
    num_stages = pp * parallel.num_virtual_stages_per_pipeline_rank
    is_known = parallel.pipeline_schedule in SCHEDULES
    return pp > 1 and num_stages <= MAX_STAGES and is_known


def rank_grid(grid: Grid, *, title: str) -> str:
    """A table of ranks: a row per pipeline stage and replica, a column per rank of a stage.

    Where a stage of a replica is one rank, the columns are the replicas. Pipeline stages have
    colors. Axes of one rank are not named, and only the first and the last ranks of a long axis are
    drawn.
    """
    *across, replica = (axis for axis in grid.axes if axis != "pp")
    down = ["pp", replica]
    if all(grid.size(axis) == 1 for axis in across):
        across, down = [replica], ["pp", *across]
    columns = list(_positions(grid, across[::-1]))
    header = [f"<th>{title}</th>"]
    header += [f"<th>{_label(grid, column)}</th>" for column in columns]
    lines = [f"<tr>{''.join(header)}</tr>"]
    for row in _positions(grid, down):
        cells = [_cell(grid, row | column) for column in columns]
        lines.append(f"<tr><th>{_label(grid, row)}</th>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table class="ranks">{"".join(lines)}</table></div>'


def groups_table(topology: Topology, *, has_experts: bool) -> str:
    """The groups of several ranks, equal ones in one row; empty where all are single ranks."""
    names_of: dict[tuple[Ranks, ...], list[str]] = {}
    for name in used_groups(has_experts):
        names_of.setdefault(topology.groups_of(name), []).append(name)
    rows = []
    for groups, names in names_of.items():
        size = len(groups[0])
        if size > 1:
            rows.append((", ".join(names), f"{len(groups)} x {size}", ranks_text(groups)))
    return html_table(("groups", "number x ranks", "ranks"), rows) if rows else ""


def _cell(grid: Grid, at: Mapping[str, int | None]) -> str:
    """The cell of a rank, or of ranks that are left out."""
    coords = {}
    for axis, coordinate in at.items():
        if coordinate is None:
            return f"<td>{GAP}</td>"
        coords[axis] = coordinate
    color = coords["pp"] % NUM_COLORS
    return f'<td class="stage{color}" title="{_label(grid, at)}">{grid.rank(coords)}</td>'


def _positions(grid: Grid, axes: Sequence[str]) -> Iterator[dict[str, int | None]]:
    """Coordinates along axes, the slowest first; None stands for coordinates left out."""
    shown = [shorten(range(grid.size(axis)), MAX_PER_AXIS) for axis in axes]
    for coords in product(*shown):
        yield dict(zip(axes, coords, strict=True))


def _label(grid: Grid, at: Mapping[str, int | None]) -> str:
    """The coordinates along the axes of several ranks."""
    names = []
    for axis, coordinate in at.items():
        if grid.size(axis) > 1:
            names.append(GAP if coordinate is None else f"{axis}{coordinate}")
    return " ".join(names)


def schedule_html(parallel: ParallelConfig, count: int, *, name: str) -> str:
    """A picture of the pipeline schedule, with few of its microbatches."""
    most = MICROBATCHES_PER_RANK * parallel.pipeline_model_parallel_size
    shape = PipelineShape.of(parallel, min(count, most))
    title = f"{parallel.pipeline_schedule}, {shape.num_microbatches} of {count} microbatches"
    picture = BytesIO()
    save_png(simulate(build_schedule(parallel.pipeline_schedule, shape)), picture, title=title)
    encoded = base64.b64encode(picture.getvalue()).decode()
    return f'<img alt="pipeline schedule of {escape(name)}" src="data:image/png;base64,{encoded}">'
