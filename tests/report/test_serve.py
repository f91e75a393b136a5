"""The server of a report: the page of the moment, the rows that were appended, and nothing else."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nanotrain.errors import EnvironmentFault
from nanotrain.report.serve import LOCALHOST, open_server
from tests.report.runs import write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "a", steps=3)


@pytest.fixture
def get(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    monkeypatch.setenv("no_proxy", "*")
    with open_server([folder], 0) as server:
        assert server.server_address[0] == LOCALHOST
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://{LOCALHOST}:{server.server_address[1]}"
        yield lambda path: urllib.request.urlopen(url + path).read().decode()
        server.shutdown()


def append(folder: Path, text: str) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(text)


def test_every_visit_shows_the_run_as_it_is_then(folder: Path, get: Callable[[str], str]) -> None:
    assert "<dd>3 steps" in get("/")
    append(folder, '{"step": 4, "loss": 1.0}\n')
    page = get("/")
    assert "<dd>4 steps" in page and "connect-src 'self'" in page
    for path in ("/config.yaml", "/rows/1?from=0", "/rows/0", "/rows/0?from=-1", "/../environment.json"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(path)


def test_a_page_gets_new_rows_only_and_complete_ones(folder: Path, get: Callable[[str], str]) -> None:
    size = (folder / "metrics.jsonl").stat().st_size
    assert f'"sizes":[{size}]' in get("/") and get(f"/rows/0?from={size}") == ""
    append(folder, '{"step": 4, "loss": 1.0}\n{"step": 5, "lo')
    assert get(f"/rows/0?from={size}") == '{"step": 4, "loss": 1.0}\n'


def test_a_start_and_rows_that_are_set_aside_are_another_version(folder: Path, get: Callable[[str], str]) -> None:
    versions = []
    for name in (None, "metrics.jsonl", "config.yaml"):
        if name:
            (folder / "new").write_bytes((folder / name).read_bytes())
            (folder / "new").replace(folder / name)
        summary = json.loads(get("/summary"))
        versions.append(str(summary["version"]))
        assert "<dd>3 steps" in summary["headline"]
    append(folder, '{"step": 4}\n')
    assert len(set(versions)) == 3 and str(json.loads(get("/summary"))["version"]) == versions[-1]


def test_errors_come_before_the_server(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="is not a run folder"):
        open_server([tmp_path], 0)
    with open_server([folder], 0) as server, pytest.raises(EnvironmentFault, match="cannot be opened"):
        open_server([folder], server.server_address[1])
