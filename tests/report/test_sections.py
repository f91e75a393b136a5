"""The sections of a report, and the places of their charts."""

import json
import re
from pathlib import Path
from typing import Any

from nanotrain.report.history import RunHistory
from nanotrain.report.sections import sections_of
from tests.report.runs import write_run


def test_every_chart_has_one_place(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    charts: dict[str, Any] = {}
    sections = dict(sections_of([RunHistory.read(tmp_path / "a")], charts))
    assert list(sections)[:2] == ["Summary", "Loss"] and list(sections)[-1] == "Environment"
    places = re.findall(r'<div class="chart" id="([^"]+)"', "".join(sections.values()))
    assert places == list(charts) and len(places) > 3


def test_bodies_of_several_runs_are_under_their_names(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    one = dict(sections_of([RunHistory.read(tmp_path / "a")], {}))
    runs = [RunHistory.read(tmp_path / name) for name in ("a", "b")]
    several = dict(sections_of(runs, {}))
    assert "<h3>" not in one["Checkpoints"]
    assert re.findall("<h3>(.)</h3>", several["Checkpoints"]) == ["a", "b"]


def test_steps_in_a_row_with_one_text_share_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    texts = [(10, "one"), (20, "two"), (30, "two"), (1040, "two"), (2000, "one")]
    rows = [json.dumps({"step": step, "text": text}) + "\n" for step, text in texts]
    (folder / "samples.jsonl").write_text("".join(rows))
    samples = dict(sections_of([RunHistory.read(folder)], {}))["Samples"]
    assert re.findall(r"<p>step ([^<]+)</p><pre>(\w+)</pre>", samples) == [
        ("10", "one"),
        ("20, 30, 1,040", "two"),
        ("2,000", "one"),
    ]
