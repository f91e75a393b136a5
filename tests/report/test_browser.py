"""The report in a headless Chromium or Chrome: charts are drawn, nothing is complained about,
nothing is requested.

Skipped where there is none; `CHROMIUM=/path/to/chromium` names one that is not on the PATH.
"""

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from nanotrain.report import serve
from nanotrain.report.history import RunHistory
from nanotrain.report.page import write_report
from nanotrain.report.timeline import read_timeline, save
from tests.harness import HANG_S
from tests.report.runs import expert_load, write_run
from tests.report.traces import gpu_events, write_trace

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
)
FLAGS += (
    "--disable-dev-shm-usage",
    "--enable-logging=stderr",
    "--virtual-time-budget=60000",
    "--dump-dom",
)
BROWSER = next(
    filter(None, map(shutil.which, (os.environ.get("CHROMIUM") or "chromium", *NAMES))), None
)
# its updates
BROWSERS_OWN = re.compile(r"https?://[\w.-]+\.(google|googleapis|gstatic|gvt1)\.com/")


WITH_BROWSER = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium or Chrome to open the report in; CHROMIUM=PATH names one"
)


def two_runs(folder: Path, *, steps: int = 40) -> list[Path]:
    """A run of some steps with everything that a page shows, and one of many steps."""
    folders = [
        write_run(folder / "a", steps=steps, moe=expert_load),
        write_run(folder / "b", steps=3000),
    ]
    write_trace(folders[0], gpu_events())
    starts = [
        {"step": step, "time_s": 1.0, "world_size": step + 1, "changed": {}} for step in (0, 20)
    ]
    (folders[0] / "starts.jsonl").write_text("".join(f"{json.dumps(start)}\n" for start in starts))
    save(read_timeline(folders[0]), folders[0])
    return folders


@WITH_BROWSER
def test_a_report_of_two_runs_is_drawn(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    write_report([RunHistory.read(folder) for folder in two_runs(tmp_path)], page)
    done, requests = opened(page.as_uri(), tmp_path, width=1400)
    found = assert_drawn(done, width=1400)
    assert int(found["shown"]) < 1000, "ms until the summary is seen"
    assert done.stdout.count(">resumed on 21 ranks<") == 1, "on the chart of the loss"
    urls = set(re.findall(r'"url":"(https?://[^"]*)"', requests.read_text()))
    assert not [url for url in urls if not BROWSERS_OWN.match(url)]


def assert_drawn(done: subprocess.CompletedProcess[str], *, width: int) -> dict[str, str]:
    """The page is complete, as wide as the window, and nothing is complained about; returns what it
    says of itself.
    """
    charts = re.findall(
        r'<figcaption>[^<]+<span>([^<]*)</span></figcaption><div class="chart[^"]*" id="chart-\d+"',
        done.stdout,
    )
    found = dict(re.findall(r' data-(\w+)="([^"]*)"', re.findall(r"<body[^>]*>", done.stdout)[0]))
    assert found["drawn"] == str(len(charts)) and len(charts) >= 8 and all(charts), (
        "every chart has a unit"
    )
    assert "opened" in found, "ms until the first chart"
    assert found["overflow"] == "0", f"the page is wider than a window of {width} pixels"
    assert done.stdout.count('class="main-svg"') >= len(charts)
    assert "error" not in found and 'data-title="Share' not in done.stdout
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return found


@WITH_BROWSER
def test_a_served_page_follows_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, reply = two_runs(tmp_path, steps=3), serve.reply
    folder = runs[0]

    def grow(folders: Sequence[Path], path: str) -> tuple[str, bytes] | None:
        """A reply, after the page is there with another row."""
        if (
            path.startswith("/rows/")
            and (number := len((folder / "metrics.jsonl").read_text().splitlines()) + 1) < 6
        ):
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(
                    json.dumps(
                        {"step": number, "loss": 1.0, "consumed_tokens": 64, "step_time_s": 1.0}
                    )
                    + "\n"
                )
        return reply(folders, path)

    monkeypatch.setattr(serve, "reply", grow)
    with serve.open_server(runs, 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        done, _ = opened(
            f"http://{serve.LOCALHOST}:{server.server_address[1]}", tmp_path, width=800
        )
        server.shutdown()
    assert (
        re.search(r'<body[^>]* data-steps="5,3000"', done.stdout)
        and "<td>5 steps of 40, " in done.stdout
    )
    assert_drawn(done, width=800)


def opened(url: str, folder: Path, *, width: int) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The browser's output and the file of its requests; a browser that crashes by itself is
    started again.
    """
    for number in range(3):
        requests = folder / f"requests-{number}.json"
        own = [
            f"--user-data-dir={folder / f'profile-{number}'}",
            f"--log-net-log={requests}",
            f"--window-size={width},900",
        ]
        command = [str(BROWSER), *FLAGS, *own, url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
        if done.returncode == 0:
            return done, requests
    empty = subprocess.run(
        [*command[:-1], "about:blank"], capture_output=True, timeout=HANG_S, check=False
    )
    assert empty.returncode, (
        f"{BROWSER} ends with code {done.returncode} at the report only: {done.stderr[-300:]}"
    )
    pytest.skip(
        f"{BROWSER} ends with code {empty.returncode} without a page too: {done.stderr[-300:]}"
    )


def test_the_page_counts_what_it_has_drawn(tmp_path: Path) -> None:
    """What the test above reads is in the page, whether or not there is a browser."""
    page = tmp_path / "report.html"
    write_report([RunHistory.read(write_run(tmp_path / "a"))], page)
    text = page.read_text()
    assert 'addEventListener("beforeprint"' in text, "a page is printed with all its charts"
    assert "drawn: Object" in text and "document.body.dataset.error = " in text
    figures = re.search(r'<script id="figures"[^>]*>(.*?)</script>', text)
    assert figures is not None
    assert set(json.loads(figures[1])["charts"]) == set(
        re.findall(r'class="chart" id="([^"]*)"', text)
    )
