"""`write_report`: one self-contained HTML file about runs, with its data and plotly."""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
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
from nanotrain.report import figures
from nanotrain.report.history import RunHistory
from nanotrain.report.sections import sections_of
from nanotrain.runs.files import OTHER_FOLDER, write_text

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
    """The HTML of a report; a live one asks its server for rows after the state in `live`."""
    charts: dict[str, figures.Figure] = {}
    links = []
    sections = []
    for name, body in sections_of(runs, charts):
        if body:
            links.append(f'<a href="#{name.lower()}">{escape(name)}</a>')
            sections.append(_section(name, body))
    columns: set[str] = set()
    for run in runs:
        columns.update(run.columns)
    data = {
        "charts": charts,
        "axes": [figures.axes_of(run) for run in runs],
        "starts": [_newest_starts(run) for run in runs],
        "columns": sorted(columns),
        "live": live,
    }
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    program = _file("page.js")
    hash_of_program = _hash(program.encode())
    hash_of_plotly, plotly = _plotly()
    page = Template(_file("page.html"))
    return page.substitute(
        title=escape(title),
        connect="connect-src 'self'" if live else "",
        style=_file("page.css"),
        written=f"nanotrain, written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        links="".join(links),
        sections="".join(sections),
        figures=_script_json(data),
        # the policy names the two programs by their hashes: no text of a run can become one
        programs=f"{hash_of_program} {hash_of_plotly}",
        plotly=plotly,
        program=program,
    )


def _script_json(data: Mapping[str, Any]) -> str:
    """Data as JSON inside a script element, which a "<" of "</script>" in a text would end."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _newest_starts(run: RunHistory) -> list[dict[str, Any]]:
    """The starts of a run that charts mark."""
    return [asdict(start) for start in run.starts[-MAX_STARTS:]]


def _section(title: str, body: str) -> str:
    state = "" if title in FOLDED else " open"
    return (
        f'<details id="{title.lower()}"{state}><summary>{escape(title)}</summary>{body}</details>'
    )


@cache
def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _plotly() -> tuple[str, str]:
    """The hash of plotly.min.js and the program compressed, without importing the package."""
    spec = find_spec("plotly")
    assert spec is not None and spec.submodule_search_locations, "plotly is a dependency"
    package = Path(spec.submodule_search_locations[0])
    program = (package / "package_data" / "plotly.min.js").read_bytes()
    # 1 % larger than by 9 in half the time
    packed = gzip.compress(program, compresslevel=5, mtime=0)
    return _hash(program), base64.b64encode(packed).decode()


def _hash(program: bytes) -> str:
    return f"'sha256-{base64.b64encode(sha256(program).digest()).decode()}'"
