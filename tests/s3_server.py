"""An S3 server over HTTP for tests: moto's, behind a layer that counts requests and plants faults.

    with server.faults(lambda request: "500" if request.method == "PUT" else None): ...

A fault is "500", "denied", "skewed" (the clock), "reset" (no answer), "truncated" (half of the
body), "short" (as if half of it were all) or "slow".
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import pytest

pytest.importorskip("s3fs")

from nanotrain.storage import remote

SLOW_S = 0.2
ERROR = "<Error><Code>{}</Code><Message>{}</Message></Error>"


class Request(NamedTuple):
    """One request."""

    method: str
    path: str
    query: str


class S3Server:
    """The server, on a thread of this process."""

    def __init__(self) -> None:
        pytest.importorskip("flask_cors")
        # here, because the ranks of tests import this module too
        from werkzeug.serving import make_server

        self._app = pytest.importorskip("moto.server").create_backend_app("s3")
        self.fault: Callable[[Request], str | None] = lambda request: None
        self.requests: list[Request] = []
        self._http = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def _answer(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        request = Request(environ["REQUEST_METHOD"], environ["PATH_INFO"], environ["QUERY_STRING"])
        self.requests.append(request)
        fault = self.fault(request)
        if fault == "slow":
            time.sleep(SLOW_S)
        if fault in ("500", "denied", "skewed"):
            status, code, text = {
                "500": ("500 Internal Server Error", "InternalError", "planted"),
                "denied": ("403 Forbidden", "AccessDenied", "planted: Access Denied"),
                "skewed": (
                    "403 Forbidden",
                    "RequestTimeTooSkewed",
                    "The difference between the request time ...",
                ),
            }[fault]
            start_response(status, [("Content-Type", "application/xml")])
            return [ERROR.format(code, text).encode()]
        if fault == "reset":
            environ["werkzeug.socket"].shutdown(2)
            raise ConnectionError("planted reset")
        if fault == "short":
            return self._short(environ, start_response)
        body = b"".join(self._app(environ, start_response))
        return self._half(body) if fault == "truncated" else [body]

    def _short(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """An answer that is whole, of half of the bytes that were asked for."""
        started: list[Any] = []
        body = b"".join(self._app(environ, lambda *args: started.extend(args)))
        body = body[: len(body) // 2]
        headers = [(name, value) for name, value in started[1] if name.lower() != "content-length"]
        start_response(started[0], [*headers, ("Content-Length", str(len(body)))])
        return [body]

    @staticmethod
    def _half(body: bytes) -> Iterator[bytes]:
        yield body[: len(body) // 2]
        raise ConnectionError("planted truncation")

    @contextmanager
    def faults(self, fault: Callable[[Request], str | None]) -> Iterator[None]:
        """Plant what a function returns for each request."""
        self.fault = fault
        try:
            yield
        finally:
            self.fault = lambda request: None

    @contextmanager
    def counted(self) -> Iterator[list[Request]]:
        """The requests of a block."""
        self.requests = []
        yield self.requests


def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat failed requests at once."""
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.001)


@cache
def server() -> S3Server:
    """The server of this session, with its address and credentials in the environment."""
    started = S3Server()
    os.environ.update(
        AWS_ENDPOINT_URL=started.url,
        AWS_ACCESS_KEY_ID="test-key",
        AWS_SECRET_ACCESS_KEY="test-secret",
        AWS_DEFAULT_REGION="us-east-1",
    )
    return started


def make_bucket(name: str) -> str:
    """Make a bucket; returns its address."""
    import fsspec

    server()
    fsspec.filesystem("s3", use_listings_cache=False).mkdir(name)
    return f"s3://{name}"
