"""The layout of a run: its process groups as text, and its pipeline schedule as a picture."""

import base64
from dataclasses import replace
from html import escape
from io import BytesIO

from nanotrain.config.config import ParallelConfig, TrainConfig
from nanotrain.config.derive import data_parallel_size, num_microbatches
from nanotrain.config.schema import with_values
from nanotrain.errors import NanotrainError
from nanotrain.parallel.pp.actions import PipelineShape
from nanotrain.parallel.pp.schedules import SCHEDULES, build_schedule
from nanotrain.parallel.pp.simulate import simulate
from nanotrain.report.history import RunHistory
from nanotrain.topology.picture import run_topology

MICROBATCHES_PER_RANK = 4  # a picture of more would not be legible; the rest repeats the middle


def layout_html(run: RunHistory) -> str:
    """Groups and schedule; empty where the run folder does not have a layout of this version."""
    world_size = run.environment.get("world_size")
    if not isinstance(world_size, int):
        return ""
    try:
        parallel = with_values(ParallelConfig(), _section(run, "parallel"))
        train = with_values(TrainConfig(), _section(run, "train"))
        groups = f"<pre>{escape(run_topology(parallel, world_size, as_json=False))}</pre>"
        if parallel.pipeline_model_parallel_size == 1 or parallel.pipeline_schedule not in SCHEDULES:
            return groups
        count = num_microbatches(train, data_parallel_size(parallel, world_size))
        return groups + _schedule(parallel, count, name=run.name)
    except NanotrainError:  # written by another version
        return ""


def _schedule(parallel: ParallelConfig, count: int, *, name: str) -> str:
    from nanotrain.parallel.pp.draw_png import save_png  # matplotlib takes half a second to import

    num_ranks = parallel.pipeline_model_parallel_size
    shape = PipelineShape(num_ranks, parallel.num_virtual_stages_per_pipeline_rank, count)
    shape = replace(shape, num_microbatches=min(count, MICROBATCHES_PER_RANK * num_ranks))
    title = f"{parallel.pipeline_schedule}, {shape.num_microbatches} of {count} microbatches"
    picture = BytesIO()
    save_png(simulate(build_schedule(parallel.pipeline_schedule, shape)), picture, title=title)
    encoded = base64.b64encode(picture.getvalue()).decode()
    return f'<img alt="pipeline schedule of {escape(name)}" src="data:image/png;base64,{encoded}">'


def _section(run: RunHistory, name: str) -> dict[str, object]:
    prefix = f"{name}."
    return {key.removeprefix(prefix): value for key, value in run.config.items() if key.startswith(prefix)}
