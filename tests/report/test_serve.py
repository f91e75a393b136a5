"""The server of a report: the page of the moment, the rows that were appended, and nothing else."""

import json
import os
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from nanotrain.errors import EnvironmentFault
from nanotrain.report import serve
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
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
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
    for path in (
        "/config.yaml",
        "/rows/1?from=0",
        "/rows/0",
        "/rows/0?from=-1",
        "/../environment.json",
    ):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(path)


def test_a_page_gets_new_rows_only_and_complete_ones(
    folder: Path, get: Callable[[str], str]
) -> None:
    size = (folder / "metrics.jsonl").stat().st_size
    assert f'"sizes":[{size}]' in get("/") and get(f"/rows/0?from={size}") == ""
    append(folder, '{"step": 4, "loss": 1.0}\n{"step": 5, "lo')
    assert get(f"/rows/0?from={size}") == '{"step": 4, "loss": 1.0}\n'


def test_a_start_and_rows_that_are_set_aside_are_another_version(
    folder: Path, get: Callable[[str], str]
) -> None:
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
    with (
        open_server([folder], 0) as server,
        pytest.raises(EnvironmentFault, match="cannot be opened"),
    ):
        open_server([folder], server.server_address[1])


@pytest.fixture
def port(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    # the server, and four connections
    monkeypatch.setattr(serve, "MAX_THREADS", threading.active_count() + 1 + 4)
    monkeypatch.setattr(serve, "TIMEOUT_S", 1.0)
    with open_server([folder], 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def ask(port: int, host: str | None) -> bytes:
    header = "" if host is None else f"Host: {host}\r\n"
    with socket.create_connection((LOCALHOST, port), timeout=60) as client:
        client.sendall(f"GET /summary HTTP/1.1\r\n{header}\r\n".encode())
        return client.makefile("rb").readline()


def ask_until_answered(port: int, host: str | None) -> bytes:
    """The status line; a connection is closed without one while threads of earlier connections have
    not ended.
    """
    while True:
        try:
            if line := ask(port, host):
                return line
        except ConnectionError:
            pass


def test_a_name_that_is_not_of_this_machine_is_refused(port: int) -> None:
    for host in (f"{LOCALHOST}:{port}", f"localhost:{port}", "localhost", "127.0.0.1:9999"):
        assert b" 200 " in ask_until_answered(port, host)
    for other in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1.evil.example",
        "[::1",
        "",
        None,
        "localhost:x",
    ):
        assert b" 421 " in ask_until_answered(port, other), other


def test_idle_connections_are_bounded_and_end(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    idle = [socket.create_connection((LOCALHOST, port), timeout=60) for _ in range(4)]
    # one by one: a connection that the system's queue does not take is tried again after a second
    for _ in range(40):
        with socket.create_connection((LOCALHOST, port), timeout=60) as client:
            assert client.recv(1) == b"", "closed at once"
    assert threading.active_count() <= before + 4
    assert all(client.recv(1) == b"" for client in idle), "closed after the timeout"
    for client in idle:
        client.close()
    assert (
        b" 200 " in ask_until_answered(port, "localhost")
        and "Traceback" not in capfd.readouterr().err
    )


def test_a_client_that_leaves_is_no_traceback(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(5):
        client = socket.create_connection((LOCALHOST, port), timeout=60)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        client.close()
    assert b" 200 " in ask_until_answered(port, "localhost")
    assert "Traceback" not in capfd.readouterr().err


def test_metrics_that_became_a_pipe_are_an_error_at_once(folder: Path, port: int) -> None:
    (folder / "metrics.jsonl").unlink()
    os.mkfifo(folder / "metrics.jsonl")
    with socket.create_connection((LOCALHOST, port), timeout=60) as client:
        client.sendall(b"GET /rows/0?from=0 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 500 " in client.makefile("rb").readline()


def test_clients_that_send_a_byte_now_and_then_keep_nobody_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty, each with a request that never ends."""
    with open_server([folder], 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        port = server.server_address[1]
        slow = []
        for _ in range(40):
            client = socket.create_connection((LOCALHOST, port), timeout=60)
            client.sendall(b"G")
            slow.append(client)
        for client in slow:
            with suppress(OSError):  # the server has closed it
                client.sendall(b"E")
        for _ in range(5):
            assert b" 200 " in ask_until_answered(port, LOCALHOST)
        for client in slow:
            client.close()
        server.shutdown()
