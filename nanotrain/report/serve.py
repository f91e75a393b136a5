"""`open_server`: the report of runs on this machine; its page follows the runs while they train.

GET /                  the page
GET /rows/0?from=4096  the rows of the metrics of the first run after this many bytes
GET /summary           JSON: the summary, and the versions of the runs, which reload the page
"""

import json
import re
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from nanotrain.errors import EnvironmentFault, NanotrainError
from nanotrain.report.history import RunHistory
from nanotrain.report.page import render
from nanotrain.report.tables import headline
from nanotrain.runs.folder import RunFolder
from nanotrain.untrusted import open_file

# never another address: a run's configuration and texts are not for everyone
LOCALHOST = "127.0.0.1"
HOSTS = r"(127\.0\.0\.1|localhost)(:\d{1,5})?"
MAX_THREADS = 32  # threads of the process, including its connections
MAX_WAITING = 16  # connections that have not sent their request yet
TIMEOUT_S = 10.0  # timeout of a connection that sends nothing
MOST_BYTES = 1 << 22  # rows in one reply


def reply(folders: Sequence[Path], path: str) -> tuple[str, bytes] | None:
    """The content type and the content of a page; None for an unknown path.

    Raises:
        NanotrainError: a folder is not a run folder any more.
        OSError, ValueError: metrics cannot be read.
    """
    if match := re.fullmatch(r"/rows/(\d{1,4})\?from=(\d{1,18})", path):
        index = int(match[1])
        if index >= len(folders):
            return None
        return "application/x-ndjson", rows_after(folders[index], int(match[2]))
    if path not in ("/", "/index.html", "/summary"):
        return None
    sizes = [metrics_size(folder) for folder in folders]  # before they are read
    runs = [RunHistory.read(folder) for folder in folders]
    version = [f"{run.state()} {_version(run.folder)}" for run in runs]
    if path == "/summary":
        summary = {"version": version, "headline": headline(runs)}
        return "application/json", json.dumps(summary).encode()
    return "text/html", render(runs, live={"sizes": sizes, "version": version}).encode()


def rows_after(folder: Path, offset: int) -> bytes:
    """The complete rows of the metrics of a run from an offset on, as many as fit a reply."""
    with open_file(RunFolder(folder).metrics) as file:
        file.seek(offset)
        rows = file.read(MOST_BYTES)
    return rows[: rows.rfind(b"\n") + 1]


def metrics_size(folder: Path) -> int:
    """Bytes of the metrics of a run."""
    metrics = RunFolder(folder).metrics
    return metrics.stat().st_size if metrics.is_file() else 0


def _version(folder: Path) -> str:
    """The version of a run: it changes with config.yaml, which a start replaces, and metrics.jsonl.

    Rows that are set aside leave a new metrics.jsonl.
    """
    files = (folder / "config.yaml", RunFolder(folder).metrics)
    return " ".join(str(path.stat().st_ino) for path in files if path.is_file())


class _Server(ThreadingHTTPServer):
    """A server of few connections at a time, each a thread; others are closed.

    Of too many connections that have not sent their request yet, the oldest one is closed: clients
    that send a byte now and then cannot keep others out.
    """

    def __init__(self, *args: Any) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Any, None] = {}  # connections without a request, the oldest first
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a request on a thread; close it if there are too many."""
        with self._lock:
            self._waiting[request] = None
            if len(self._waiting) > MAX_WAITING:
                oldest = next(iter(self._waiting))
                del self._waiting[oldest]
                with suppress(OSError):  # it has closed the connection
                    oldest.shutdown(socket.SHUT_RDWR)
        if threading.active_count() < MAX_THREADS:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def received(self, request: Any) -> None:
        """Record that a connection has sent its request."""
        with self._lock:
            self._waiting.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        self.received(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # a client that has left
            super().handle_error(request, client_address)


def open_server(folders: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """A server of the report of these run folders; port 0 chooses a free one.

    Raises:
        EnvironmentFault: a folder is not a run folder, or the port is taken.
    """
    for folder in folders:
        RunHistory.read(folder)

    class Handler(BaseHTTPRequestHandler):
        timeout = TIMEOUT_S

        def do_GET(self) -> None:
            """Send a page; requests under another host's name are refused."""
            status = 200
            assert isinstance(self.server, _Server), "it is opened below"
            self.server.received(self.connection)
            # a page elsewhere could give its own name the address of this machine
            if not re.fullmatch(HOSTS, self.headers.get("Host", "")):
                self.send_error(421, "this server is for its own machine")
                return
            try:
                with drawing:
                    page = reply(folders, self.path)
            except (NanotrainError, OSError, ValueError) as error:  # the folder is gone
                page, status = ("text/plain", str(error).encode()), 500
            if page is None:
                self.send_error(404)
                return
            kind, content = page
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Visits are not logged."""

    drawing = threading.Lock()
    try:
        return _Server((LOCALHOST, port), Handler)
    except OSError as error:
        fix = "choose another --port, or 0 for a free one"
        raise EnvironmentFault(
            f"port {port} cannot be opened", why=error.strerror or str(error), fix=fix
        ) from error
