"""The report in a headless Chromium or Chrome: charts are drawn, nothing is complained about, nothing is requested.

Skipped where there is none; `CHROMIUM=/path/to/chromium` names one that is not on the PATH.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from nanotrain.report.history import RunHistory
from nanotrain.report.page import write_report
from nanotrain.report.timeline import read_timeline, save
from tests.harness import HANG_S
from tests.report.runs import expert_load, write_run
from tests.report.traces import gpu_events, write_trace

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
FLAGS += ("--disable-dev-shm-usage", "--enable-logging=stderr", "--virtual-time-budget=60000", "--dump-dom")
BROWSER = next(filter(None, map(shutil.which, (os.environ.get("CHROMIUM") or "chromium", *NAMES))), None)
BROWSERS_OWN = re.compile(r"https?://[\w.-]+\.(google|googleapis|gstatic|gvt1)\.com/")  # its updates


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome to open the report in; CHROMIUM=PATH names one")
def test_a_report_of_two_runs_is_drawn(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "a", moe=expert_load), write_run(tmp_path / "b", steps=3000)]
    write_trace(folders[0], gpu_events())
    save(read_timeline(folders[0]), folders[0])
    page = tmp_path / "report.html"
    write_report([RunHistory.read(folder) for folder in folders], page)

    done, requests = opened(page, tmp_path)

    charts = re.findall(r'class="chart[^"]*" id="(chart-\d+)"', done.stdout)
    assert re.search(rf'<body[^>]* data-drawn="{len(charts)}"', done.stdout) and len(charts) >= 8
    assert re.search(r'<body[^>]* data-opened="\d+"', done.stdout), "the time until the first chart"
    assert done.stdout.count('class="main-svg"') >= len(charts)
    assert "data-error" not in done.stdout.partition("<h1>")[0]
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    urls = set(re.findall(r'"url":"(https?://[^"]*)"', requests.read_text()))
    assert not [url for url in urls if not BROWSERS_OWN.match(url)]


def opened(page: Path, folder: Path) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The browser's output and the file of its requests; a browser that crashes by itself is started again."""
    for number in range(3):
        requests = folder / f"requests-{number}.json"
        own = (f"--user-data-dir={folder / f'profile-{number}'}", f"--log-net-log={requests}")
        command = [str(BROWSER), *FLAGS, *own, page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
        if done.returncode == 0:
            return done, requests
    empty = subprocess.run([*command[:-1], "about:blank"], capture_output=True, timeout=HANG_S, check=False)
    assert empty.returncode, f"{BROWSER} ends with code {done.returncode} at the report only: {done.stderr[-300:]}"
    pytest.skip(f"{BROWSER} ends with code {empty.returncode} without a page too: {done.stderr[-300:]}")


def test_the_page_counts_what_it_has_drawn(tmp_path: Path) -> None:
    """What the test above reads is in the page, whether or not there is a browser."""
    page = tmp_path / "report.html"
    write_report([RunHistory.read(write_run(tmp_path / "a"))], page)
    text = page.read_text()
    assert 'addEventListener("beforeprint"' in text, "a page is printed with all its charts"
    assert "document.body.dataset.drawn = " in text and "document.body.dataset.error = " in text
    figures = re.search(r'<script id="figures"[^>]*>(.*?)</script>', text)
    assert figures is not None
    assert set(json.loads(figures[1])) == set(re.findall(r'class="chart" id="([^"]*)"', text))
