"""`write_report`: one HTML file about one or several runs, with its data, its programs and plotly."""

import base64
import gzip
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from html import escape
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

from nanotrain.errors import EnvironmentFault
from nanotrain.report import figures, tables, timeline
from nanotrain.report.history import RunHistory
from nanotrain.report.layout import layout_html
from nanotrain.runs.files import OTHER_FOLDER, write_text

MAX_SAMPLES = 20  # newest generated texts of each run
MAX_STARTS = 50  # newest starts of each run, which charts mark
FOLDED = ("Settings", "Checkpoints", "Environment")


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
        raise EnvironmentFault(
            f"{output} cannot be written", why=f"there is no folder {output.parent}", fix=fix
        )
    if output.is_file() and output.suffix not in (".html", ".htm"):
        raise EnvironmentFault(f"{output} would be replaced", why="it is no .html file", fix=fix)


def render(runs: Sequence[RunHistory], *, live: Mapping[str, Any] | None = None) -> str:
    """The HTML of a report; a live one asks its server for what comes after the state in `live`."""
    charts: dict[str, figures.Figure] = {}
    sections = [(title, body) for title, body in _sections(runs, charts) if body]
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    columns = sorted({name for run in runs for name in run.columns})
    starts = [[asdict(start) for start in run.starts[-MAX_STARTS:]] for run in runs]
    axes = [figures.axes_of(run) for run in runs]
    data = {"charts": charts, "axes": axes, "starts": starts, "columns": columns, "live": live}
    hash_of_plotly, plotly = _plotly()
    return Template(_file("page.html")).substitute(
        title=escape(title),
        connect="connect-src 'self'" if live else "",
        style=_file("page.css"),
        written=f"nanotrain, written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        links="".join(f'<a href="#{name.lower()}">{escape(name)}</a>' for name, _ in sections),
        sections="".join(_section(name, body) for name, body in sections),
        # "<" would end the script element where a text contains "</script>"
        figures=json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        # the policy names the two programs by their hashes: no text of a run can become one
        programs=f"{_hash(_file('page.js').encode())} {hash_of_plotly}",
        plotly=plotly,
        program=_file("page.js"),
    )


def _section(title: str, body: str) -> str:
    state = "" if title in FOLDED else " open"
    return (
        f'<details id="{title.lower()}"{state}><summary>{escape(title)}</summary>{body}</details>'
    )


def _sections(
    runs: Sequence[RunHistory], charts: dict[str, figures.Figure]
) -> Iterable[tuple[str, str]]:
    """Titles and bodies; the figures that the bodies refer to are added to `charts`."""

    def grid(drawn: Iterable[figures.Figure | None]) -> str:
        cells = ""
        for figure in drawn:
            if figure is not None:
                name, meta = f"chart-{len(charts)}", figure["layout"]["meta"]
                charts[name] = figure
                caption = f"<figcaption>{escape(meta['title'])} <span>{escape(meta['unit'])}</span></figcaption>"
                cells += f'<figure>{caption}<div class="chart" id="{name}"></div></figure>'
        return f'<div class="grid">{cells}</div>' if cells else ""

    def each(body: Callable[[RunHistory], str]) -> str:
        """The bodies of all runs, under the names of several."""
        titles = [f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else "" for run in runs]
        return "".join(
            title + text for title, run in zip(titles, runs, strict=True) if (text := body(run))
        )

    over_steps = figures.step_figures(runs)
    over_steps["Experts"] += [figure for run in runs for figure in figures.expert_figures(run)]
    yield "Summary", f'<div id="headline">{tables.headline(runs)}</div>'
    for title, drawn in over_steps.items():
        yield title, grid(drawn)
    yield "Data", each(tables.stage_table)
    yield "Memory", grid([figures.memory_figure(runs)])
    # the step that `nanotrain timeline` drew last
    saved = [(run.name, timeline.load(run.folder)) for run in runs]
    yield "Timeline", grid(timeline.figure_of(each, name=name) for name, each in saved if each)
    yield "Layout", each(layout_html)
    yield "Samples", each(_samples)
    yield "Restarts", each(tables.starts_table)
    yield (
        "Settings",
        '<input type="search" id="filter" placeholder="filter settings">'
        + tables.config_table(runs),
    )
    yield "Checkpoints", each(tables.checkpoint_table)
    yield "Environment", tables.environment_table(runs)


def _samples(run: RunHistory) -> str:
    newest = run.samples[-MAX_SAMPLES:]
    return "".join(
        f"<p>step {escape(str(each.get('step')))}</p><pre>{escape(str(each['text']))}</pre>"
        for each in newest
    )


@cache
def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _plotly() -> tuple[str, str]:
    """The hash of plotly.min.js and the program compressed; the installed package is not imported."""
    spec = find_spec("plotly")
    assert spec is not None and spec.submodule_search_locations, "plotly is a dependency"
    program = (
        Path(spec.submodule_search_locations[0]) / "package_data" / "plotly.min.js"
    ).read_bytes()
    # 1 % larger than by 9 in half the time
    packed = gzip.compress(program, compresslevel=5, mtime=0)
    return _hash(program), base64.b64encode(packed).decode()


def _hash(program: bytes) -> str:
    return f"'sha256-{base64.b64encode(sha256(program).digest()).decode()}'"
