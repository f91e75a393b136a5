"""Shard files in the memory of other hosts: a server per rank, and a source that reads from it.

A server listens on the network in which the ranks met. A file is asked for over HTTP in ranges,
with a token that the ranks exchanged when they met. Only manifests and shards of the served folder
are sent. What arrives is compared with the checksums of
the manifest by the reader (`ShardFile`).
"""

import ipaddress
import os
import re
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from threading import Thread
from typing import NamedTuple

TIMEOUT_S = 30.0  # without a byte from a peer
_PATH = re.compile(
    r"/(?P<token>[0-9a-f]{32})"
    r"/(?P<file>step-\d{8,}(\.tmp)?/(manifest\.json|shard-\d{5,}-of-\d{5,}\.safetensors))"
)
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")


class Peer(NamedTuple):
    """The server of a rank."""

    address: str
    port: int
    token: str


class PeerServer:
    """Serves the step folders of a folder, on threads, until it is closed.

    Args:
        folder: the folder of the run in the memory of this host.
        address: the address at which other hosts reach this one.
    """

    def __init__(self, folder: Path, address: str) -> None:
        token = secrets.token_hex(16)

        class Handler(_Handler):
            served = folder
            expected = token

        class Server(ThreadingTCPServer):
            address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
            daemon_threads = True

        self._server = Server((_bound_address(address), 0), Handler)
        self.peer = Peer(address, self._server.server_address[1], token)
        Thread(target=self._server.serve_forever, name="peer-server", daemon=True).start()

    def close(self) -> None:
        """End the server; a transfer that runs is not waited for."""
        self._server.shutdown()
        self._server.server_close()


def _bound_address(address: str) -> str:
    """The address on which a server listens; empty for all interfaces.

    Here a name of this machine may stand for its loopback interface; on other hosts it does not.

    >>> _bound_address("10.0.0.2"), _bound_address("localhost"), _bound_address("node1")
    ('10.0.0.2', 'localhost', '')
    """
    if address == "localhost":
        return address
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return ""


class _Handler(BaseHTTPRequestHandler):
    """Sends a range of one file; anything else is "not found"."""

    served: Path
    expected: str
    protocol_version = "HTTP/1.1"
    timeout = TIMEOUT_S

    def do_GET(self) -> None:
        """Send the bytes that are asked for."""
        match = _PATH.fullmatch(self.path)
        if match is None or not secrets.compare_digest(match["token"], self.expected):
            self.send_error(404)
            return
        try:
            handle = os.open(self.served / match["file"], os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            self.send_error(404)
            return
        with open(handle, "rb") as file:
            size = os.fstat(handle).st_size
            bounds = _RANGE.fullmatch(self.headers.get("Range", ""))
            start, end = (int(bounds[1]), int(bounds[2]) + 1) if bounds else (0, size)
            count = max(0, min(end, size) - start)
            self.send_response(206 if bounds else 200)
            self.send_header("Content-Length", str(count))
            self.end_headers()
            self.wfile.flush()
            if count:
                self.connection.sendfile(file, start, count)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is logged."""


class PeerSource:
    """A shard file on another host; each read is one request.

    Args:
        peer: the server of a rank on that host.
        file: step folder and name of the file.
        size: its size in the manifest, in bytes.
    """

    max_bytes = 2**31

    def __init__(self, peer: Peer, file: str, *, size: int) -> None:
        self._peer = peer
        self._file = file
        self.size = size

    def read_into(self, into: memoryview, offset: int) -> int:
        """Read at an offset; the number of bytes, which is 0 at the end of the file.

        Raises:
            OSError: the host does not answer.
        """
        stop = min(offset + len(into), self.size)
        data = into[: max(0, stop - offset)]
        if not data:
            return 0
        done = 0
        headers = {"Range": f"bytes={offset}-{stop - 1}"}
        with _request(self._peer, self._file, headers=headers) as response:
            while done < len(data):
                count = response.readinto(data[done:])
                if not count:
                    break
                done += count
        return done

    def close(self) -> None:
        """Nothing is open."""


def fetch_text(peer: Peer, file: str) -> str:
    """A manifest on another host.

    Raises:
        OSError: the host does not answer, or has no such file.
    """
    with _request(peer, file, headers={}) as response:
        return response.read().decode(errors="replace")


@contextmanager
def _request(peer: Peer, file: str, *, headers: dict[str, str]) -> Iterator[HTTPResponse]:
    """The response to a request for a file; its connection is closed after the block."""
    connection = HTTPConnection(peer.address, peer.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", f"/{peer.token}/{file}", headers=headers)
        response = connection.getresponse()
        if response.status not in (200, 206):
            raise OSError(0, f"{peer.address} does not have {file}")
        yield response
    except HTTPException as error:
        raise OSError(0, f"{peer.address}:{peer.port} does not answer: {error!r}") from None
    finally:
        connection.close()
