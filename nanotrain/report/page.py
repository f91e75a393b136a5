"""`write_report`: one HTML file about one or several runs. It holds its data and plotly, and loads nothing."""

import base64
import gzip
import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from string import Template

from nanotrain.errors import EnvironmentFault
from nanotrain.report import figures, tables, timeline
from nanotrain.report.history import RunHistory
from nanotrain.report.layout import layout_html
from nanotrain.runs.files import OTHER_FOLDER, write_text

MAX_SAMPLES = 20  # newest generated texts of each run


def write_report(runs: Sequence[RunHistory], output: Path, *, fix: str = OTHER_FOLDER) -> None:
    """Write the report of runs; the file is replaced at once, so it is never incomplete.

    Args:
        runs: at least one; several are drawn over each other and their settings compared.
        output: the HTML file; replaced.
        fix: what to do besides freeing space where the file cannot be written.

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
        links="".join(f'<a href="#{_anchor(name)}">{escape(name)}</a>' for name, _ in sections),
        sections="".join(f'<h2 id="{_anchor(name)}">{escape(name)}</h2>{body}' for name, body in sections),
        # "<" would end the script element where a text contains "</script>"
        figures=json.dumps(charts, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        plotly=base64.b64encode(gzip.compress(_plotly(), compresslevel=6, mtime=0)).decode(),
    )


def _sections(runs: Sequence[RunHistory], charts: dict[str, figures.Figure]) -> Iterable[tuple[str, str]]:
    """Titles and bodies; the figures that the bodies refer to are added to `charts`."""

    def place(drawn: Iterable[figures.Figure | None]) -> str:
        cells = []
        for figure in drawn:
            if figure is not None:
                name = f"chart-{len(charts)}"
                charts[name] = figure
                cells.append(f'<div class="chart" id="{name}"></div>')
        return "".join(cells)

    def grid(drawn: Iterable[figures.Figure | None]) -> str:
        cells = place(drawn)
        return f'<div class="grid">{cells}</div>' if cells else ""

    yield "Runs", tables.summary_table(runs)
    yield "Loss", place([figures.loss_figure(runs)])
    yield "Training", grid(figures.step_figures(runs))
    yield "Data", "".join(_titled(run, tables.stage_table(run)) for run in runs)
    yield "Experts", grid(figure for run in runs for figure in figures.expert_figures(run))
    yield "Memory", place([figures.memory_figure(runs)])
    yield "Timeline", place(_timeline(run) for run in runs)
    yield "Layout", "".join(_titled(run, layout_html(run)) for run in runs)
    yield "Samples", "".join(_titled(run, _samples(run)) for run in runs)
    yield "Configuration", tables.config_table(runs)
    yield "Checkpoints", "".join(_titled(run, tables.checkpoint_table(run)) for run in runs)
    yield "Environment", tables.environment_table(runs)


def _timeline(run: RunHistory) -> figures.Figure | None:
    """The step that `nanotrain timeline` drew last."""
    read = timeline.load(run.folder)
    return None if read is None else timeline.figure_of(read, name=run.name)


def _samples(run: RunHistory) -> str:
    newest = run.samples[-MAX_SAMPLES:]
    return "".join(f"<p>step {one.get('step')}</p><pre>{escape(str(one['text']))}</pre>" for one in newest)


def _titled(run: RunHistory, body: str) -> str:
    return f"<h3>{escape(run.name)}</h3>{body}" if body else ""


def _anchor(title: str) -> str:
    return title.lower()


def _plotly() -> bytes:
    """plotly.min.js of the installed package, which is not imported."""
    spec = find_spec("plotly")
    assert spec is not None and spec.submodule_search_locations, "plotly is a dependency"
    return (Path(spec.submodule_search_locations[0]) / "package_data" / "plotly.min.js").read_bytes()
