"""`nanotrain watch`: the report of runs on a local port, rendered again for every request."""

from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from nanotrain.errors import EnvironmentFault, NanotrainError
from nanotrain.report.history import RunHistory
from nanotrain.report.page import render

LOCALHOST = "127.0.0.1"  # never another address: a run's configuration and texts are not for everyone


def open_server(folders: Sequence[Path], port: int) -> ThreadingHTTPServer:
    """A server of the report of these run folders; port 0 chooses a free one.

    Raises:
        EnvironmentFault: a folder is not a run folder, or the port is taken.
    """
    for folder in folders:
        RunHistory.read(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path not in ("/", "/index.html"):
                self.send_error(404)
                return
            try:
                body, status = render([RunHistory.read(folder) for folder in folders]).encode(), 200
            except NanotrainError as error:  # the folder is gone
                body, status = str(error).encode(), 500
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Visits are not logged."""

    try:
        return ThreadingHTTPServer((LOCALHOST, port), Handler)
    except OSError as error:
        fix = "choose another --port, or 0 for a free one"
        raise EnvironmentFault(f"port {port} cannot be opened", why=error.strerror or str(error), fix=fix) from error
