"""`nanotrain watch` serves on this machine only, and the newest state of the run."""

import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from nanotrain.errors import EnvironmentFault
from nanotrain.report.serve import LOCALHOST, open_server
from tests.report.runs import write_run


def test_every_visit_shows_the_run_as_it_is_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    folder = write_run(tmp_path / "a", steps=3)
    with open_server([folder], 0) as server:
        assert server.server_address[0] == LOCALHOST
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://{LOCALHOST}:{server.server_address[1]}"
        assert "3/40" in urllib.request.urlopen(url).read().decode()
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4, "loss": 1.0}\n')
        assert "4/40" in urllib.request.urlopen(url).read().decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}/config.yaml")
        server.shutdown()


def test_errors_come_before_the_server(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="is not a run folder"):
        open_server([tmp_path], 0)
    folder = write_run(tmp_path / "a")
    with open_server([folder], 0) as server, pytest.raises(EnvironmentFault, match="cannot be opened"):
        open_server([folder], server.server_address[1])
