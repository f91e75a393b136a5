"""`write_report`: one HTML file about one or several runs, with its data and plotly. `open_server`: the same served."""

import base64
import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from string import Template

from nanotrain.config.config import TrainConfig
from nanotrain.config.parallel import ParallelConfig
from nanotrain.config.schedules import num_microbatches
from nanotrain.config.schema import with_values
from nanotrain.errors import EnvironmentFault, NanotrainError
from nanotrain.parallel.pp.actions import PipelineShape
from nanotrain.parallel.pp.draw import save_png
from nanotrain.parallel.pp.schedules import SCHEDULES, build_schedule
from nanotrain.parallel.pp.simulate import simulate
from nanotrain.report import figures, tables, timeline
from nanotrain.report.history import RunHistory
from nanotrain.runs.files import OTHER_FOLDER, write_text
from nanotrain.topology.picture import run_topology

MAX_SAMPLES = 20  # newest generated texts of each run


def write_report(runs: Sequence[RunHistory], output: Path, *, fix: str = OTHER_FOLDER) -> None:
    """Write the report of runs; the file is replaced at once, so it is never incomplete.

    Args:
        runs: one run or several, which are drawn over each other and their settings compared.
        output: HTML file to replace.
        fix: cure besides freeing space where the file cannot be written.

    Raises:
        EnvironmentFault: the file cannot be written.
    """
    write_text(output, render(runs), fix=fix)


def require_html(output: Path) -> None:
    """Check that a report replaces no file of another kind.

    Raises:
        EnvironmentFault: there is one, or no folder to write into.
    """
    fix = "choose another file with --output"
    if not output.parent.is_dir():
        raise EnvironmentFault(f"{output} cannot be written", why=f"there is no folder {output.parent}", fix=fix)
    if output.is_file() and output.suffix not in (".html", ".htm"):
        raise EnvironmentFault(f"{output} would be replaced", why="it is no .html file", fix=fix)


def render(runs: Sequence[RunHistory]) -> str:
    """The HTML of a report."""
    charts: dict[str, figures.Figure] = {}
    sections = [(title, body) for title, body in _sections(runs, charts) if body]
    title = "nanotrain: " + (runs[0].name if len(runs) == 1 else f"{len(runs)} runs")
    page = Template(resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    return page.substitute(
        title=escape(title),
        written=f"written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        links="".join(f'<a href="#{name.lower()}">{escape(name)}</a>' for name, _ in sections),
        sections="".join(f'<h2 id="{name.lower()}">{escape(name)}</h2>{body}' for name, body in sections),
        # "<" would end the script element where a text contains "</script>"
        figures=json.dumps(charts, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        plotly=base64.b64encode(gzip.compress(_plotly(), compresslevel=6, mtime=0)).decode(),
    )


def _sections(runs: Sequence[RunHistory], charts: dict[str, figures.Figure]) -> Iterable[tuple[str, str]]:
    """Titles and bodies; the figures that the bodies refer to are added to `charts`."""

    def place(drawn: Iterable[figures.Figure | None], *, form: str = "{}") -> str:
        cells = ""
        for figure in drawn:
            if figure is not None:
                name = f"chart-{len(charts)}"
                charts[name] = figure
                cells += f'<div class="chart" id="{name}"></div>'
        return form.format(cells) if cells else ""

    grid = partial(place, form='<div class="grid">{}</div>')
    yield "Runs", tables.summary_table(runs)
    yield "Loss", place([figures.loss_figure(runs)])
    yield "Training", grid(figures.step_figures(runs))
    yield "Data", "".join(_titled(run, tables.stage_table(run)) for run in runs)
    yield "Experts", grid(figure for run in runs for figure in figures.expert_figures(run))
    yield "Memory", place([figures.memory_figure(runs)])
    saved = [(run.name, timeline.load(run.folder)) for run in runs]  # the step that `nanotrain timeline` drew last
    yield "Timeline", place(timeline.figure_of(each, name=name) for name, each in saved if each)
    yield "Layout", "".join(_titled(run, layout_html(run)) for run in runs)
    yield "Samples", "".join(_titled(run, _samples(run)) for run in runs)
    yield "Configuration", tables.config_table(runs)
    yield "Checkpoints", "".join(_titled(run, tables.checkpoint_table(run)) for run in runs)
    yield "Environment", tables.environment_table(runs)


def _samples(run: RunHistory) -> str:
    newest = run.samples[-MAX_SAMPLES:]
    return "".join(f"<p>step {each.get('step')}</p><pre>{escape(str(each['text']))}</pre>" for each in newest)


def _titled(run: RunHistory, body: str) -> str:
    return f"<h3>{escape(run.name)}</h3>{body}" if body else ""


def _plotly() -> bytes:
    """plotly.min.js of the installed package, which is not imported."""
    spec = find_spec("plotly")
    assert spec is not None and spec.submodule_search_locations, "plotly is a dependency"
    return (Path(spec.submodule_search_locations[0]) / "package_data" / "plotly.min.js").read_bytes()


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
        count = num_microbatches(train, parallel.data_parallel_size(world_size))
        return groups + _schedule(parallel, count, name=run.name)
    except NanotrainError:  # written by another version
        return ""


def _schedule(parallel: ParallelConfig, count: int, *, name: str) -> str:
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


LOCALHOST = "127.0.0.1"  # never another address: a run's configuration and texts are not for everyone


def open_server(folders: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """A server of the report of these run folders; port 0 chooses a free one.

    Raises:
        EnvironmentFault: a folder is not a run folder, or the port is taken.
    """
    for folder in folders:
        RunHistory.read(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path not in ("/", "/index.html"):
                self.send_error(404)
                return
            try:
                body, status = render([RunHistory.read(folder) for folder in folders]).encode(), 200
            except NanotrainError as error:  # the folder is gone
                body, status = str(error).encode(), 500
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Visits are not logged."""

    try:
        return ThreadingHTTPServer((LOCALHOST, port), Handler)
    except OSError as error:
        fix = "choose another --port, or 0 for a free one"
        raise EnvironmentFault(f"port {port} cannot be opened", why=error.strerror or str(error), fix=fix) from error
