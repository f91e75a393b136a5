"""The page: complete, escaped, without requests, small, and its program unpacks plotly and smooths."""

import base64
import gzip
import hashlib
import json
import re
import shutil
import subprocess
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from nanotrain.errors import EnvironmentFault
from nanotrain.report.history import RunHistory
from nanotrain.report.page import render, require_html, write_report
from tests.harness import HANG_S
from tests.report.runs import expert_load, write_run

PIPELINE = {"pipeline_model_parallel_size": 2, "data_parallel_sharding_strategy": "optim"}
CONFIG = {
    "train": {"train_iters": 40, "seed": 2, "global_batch_size": 8},
    "parallel": PIPELINE,
    "optim": {"lr": 0.1},
}


def attributes(page: str, name: str) -> list[str]:
    """The values of an attribute of all elements; scripts and texts are not elements."""
    bare = re.sub(
        r"(<(?:script|pre|td)[^>]*>).*?</(?:script|pre|td)>", r"\1", page, flags=re.DOTALL
    )
    return re.findall(rf'<[a-z0-9]+ (?:[^>]*\s)?{name}="([^"]*)"', bare)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs")
    first = write_run(folder / "first", moe=expert_load)
    (first / "samples.jsonl").write_text(
        '{"step": 40, "text": "</script><script>alert(1)</script>"}\n'
    )
    second = RunHistory.read(
        write_run(folder / "a<b", steps=1000, config=CONFIG, **{"</script>": lambda step: step})
    )
    columns = {name: np.repeat(values, 100) for name, values in second.columns.items()}
    second = replace(second, columns=columns | {"step": np.arange(1.0, 100_001)})
    return render([RunHistory.read(first), second])


def test_every_section_and_chart_is_there(page: str) -> None:
    ids = attributes(page, "id")
    first = [
        "summary",
        "loss",
        "training",
        "more",
        "experts",
        "other",
        "memory",
        "layout",
        "samples",
    ]
    sections = [*first, "settings", "checkpoints", "environment"]
    assert [name for name in ids if name in sections] == sections
    assert sum(name.startswith("chart-") for name in ids) == page.count('class="chart"') >= 8
    assert "pipeline schedule of a&lt;b" in page


def test_nothing_is_loaded_from_elsewhere(page: str) -> None:
    references = [*attributes(page, "src"), *attributes(page, "href")]
    assert references and all(
        reference.startswith(("#", "data:image/png;base64,")) for reference in references
    )
    assert "default-src 'none'" in page


def test_texts_of_a_run_cannot_become_elements(page: str) -> None:
    assert "<script>alert" not in page and "&lt;/script&gt;" in page
    assert page.count("</script>") == 3, "the figures, plotly and the program"


def test_settings_that_differ_come_first_and_are_marked(page: str) -> None:
    table = page[page.index('id="settings"') :]
    rows = re.findall(r"<tr>(.*?)</tr>", table[: table.index("</table>")])
    marked = [re.findall(r">([^<]*)<", row)[0] for row in rows if "differs" in row]
    assert marked[0] in CONFIG["parallel"] or "." in marked[0]
    assert {"train.seed", "train.global_batch_size"} <= set(marked) and "optim.lr" not in marked
    assert [row for row in rows if "optim.lr" in row and "arguments" in row]


def test_two_runs_of_100_000_steps_fit_in_5_mb(page: str) -> None:
    assert len(page.encode()) < 5_000_000


def test_the_page_unpacks_plotly(page: str, tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node to run the script of the page")
    packed = re.search(r'<script id="plotly"[^>]*>([^<]*)<', page)
    assert packed is not None
    (tmp_path / "packed").write_text(packed[1])
    program = f"""
    const text = require("fs").readFileSync({str(tmp_path / "packed")!r}, "latin1");
    const packed = Uint8Array.from(atob(text), c => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    new Response(stream).text().then(text => {{ new Function(text); console.log(text.slice(0, 200)); }});
    """
    done = subprocess.run(
        [node, "-e", program], capture_output=True, text=True, timeout=HANG_S, check=True
    )
    assert "plotly.js" in done.stdout


def test_a_file_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    run = RunHistory.read(write_run(tmp_path / "a"))
    with pytest.raises(EnvironmentFault, match="does not exist any more|cannot be written"):
        write_report([run], tmp_path / "absent" / "report.html")
    with pytest.raises(
        EnvironmentFault, match="a cannot be written: Is a directory; choose another file"
    ):
        write_report([run], tmp_path / "a", fix="choose another file with --output")


def test_a_report_replaces_no_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}")
    with pytest.raises(
        EnvironmentFault, match=r"metrics\.jsonl would be replaced: it is no \.html file"
    ):
        require_html(tmp_path / "metrics.jsonl")
    with pytest.raises(EnvironmentFault, match="there is no folder"):
        require_html(tmp_path / "none" / "a.html")
    for name in ("new", "old.html"):
        require_html(tmp_path / name)


def test_a_text_that_was_written_again_at_the_same_step_is_shown_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    (folder / "samples.jsonl").write_text(
        "".join(f'{{"step": {step}, "text": "t{n}"}}\n' for n, step in enumerate((3, 4, 4)))
    )
    shown = render([RunHistory.read(folder)])
    assert (
        shown.count("<p>step 4</p>") == 1 and "<pre>t0</pre>" in shown and "<pre>t2</pre>" in shown
    )


def test_restarts_are_marked_with_what_changed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    starts = [{"step": 0, "time_s": 1.0, "world_size": 2, "changed": {}}]
    starts += [
        {"step": 20, "time_s": 9.0, "world_size": 3, "changed": {"train.train_iters": [20, 40]}},
        {"step": "x"},
    ]
    (folder / "starts.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
    (folder / "metrics-superseded.jsonl").write_text('{"step": 21, "step_time_s": 1800}\n')
    page = render([RunHistory.read(folder)])
    changed = '"changed":{"train.train_iters":[20,40]}'
    assert '{"step":20,"time_s":9.0,"world_size":3,' + changed + ',"in_place":false}]]' in page
    assert "train.train_iters 20 -&gt; 40" in page and "1 steps again, 0.50 hours" in page


@pytest.mark.parametrize(
    ("of", "expected"), [("x => 3 * x + 1", 1e-9), ("x => 4 + 6 * Math.pow(x, -0.5)", 0.03)]
)
def test_smoothing_is_centred(tmp_path: Path, of: str, expected: float) -> None:
    """A line stays the line, at its ends too, and the steep beginning of a loss is not flattened."""
    checks = f"""
    const x = Array.from({{length: 400}}, (_, i) => 1 + 2.5 * i), y = x.map({of});
    console.log(Math.max(...smoothed(x, y, 200).map((value, i) => Math.abs(value - y[i]))));
    """
    assert float(run_script(tmp_path, checks)) < expected


def run_script(folder: Path, checks: str) -> str:
    """What lines behind the script of the page print."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node to run the script of the page")
    program = resources.files("nanotrain.report").joinpath("page.js").read_text()
    (folder / "program.js").write_text(program + checks)
    done = subprocess.run(
        [node, folder / "program.js"], capture_output=True, text=True, timeout=HANG_S, check=True
    )
    return done.stdout


def test_the_policy_allows_the_two_programs_of_the_page_alone(page: str) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    programs = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    packed = re.search(r'<script id="plotly"[^>]*>(.*?)</script>', page)
    assert policy is not None and packed is not None and len(programs) == 1
    texts = (programs[0].encode(), gzip.decompress(base64.b64decode(packed[1])))
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in texts
    )
    assert f"script-src {hashes};" in policy[1] and policy[1].startswith("default-src 'none'")
    assert not re.search(r"<[a-z][^>]*\son[a-z]+=", re.sub(r"(?s)<script.*?</script>", "", page)), (
        "no inline handlers"
    )


def test_logarithmic_axes_have_ticks_below_one_and_labels_of_restarts_have_room(
    tmp_path: Path,
) -> None:
    checks = """
    const ticks = logTicks(0.3, 1.3);
    const wide = logTicks(1e-9, 1e9);
    console.log(JSON.stringify([
      ticks.tickvals.filter(value => value >= 0.3 && value <= 1.3), ticks.ticktext[0],
      wide.tickvals.length < 12, logTicks(0, 1), [...withRoom([5, 0, 0.4, 1], 1)].sort(),
    ]));
    """
    printed = json.loads(run_script(tmp_path, checks))
    assert printed == [[0.5, 1], "0.1", True, None, [0, 1, 3]]
