"""The TCP connections of this process: which there are, and how they are ended.

gloo has no working abort: a collective that waits for a stopped peer returns at its timeout. It
fails at once where its connections are shut down.
"""

import os
import socket
from collections.abc import Collection
from contextlib import suppress

FILES = "/proc/self/fd"  # Linux


def open_sockets() -> dict[str, int]:
    """The sockets of this process: their inode, as the system writes it, and a file descriptor."""
    sockets = {}
    with suppress(OSError):
        for name in os.listdir(FILES):
            with suppress(OSError):  # closed meanwhile
                link = os.readlink(f"{FILES}/{name}")
                if link.startswith("socket:"):
                    sockets[link] = int(name)
    return sockets


def shut_down_connections(*, keep: Collection[str]) -> None:
    """Shut down the TCP connections of this process; operations that wait for one of them fail.

    Sockets that accept connections are left: gloo ends the process where one of them fails.

    Args:
        keep: inodes of sockets that are left, as `open_sockets` returns them.
    """
    for inode, descriptor in open_sockets().items():
        if inode in keep:
            continue
        with suppress(OSError):  # closed meanwhile, not connected, or of another kind
            _shut_down(os.dup(descriptor))


def _shut_down(descriptor: int) -> None:
    """Shut down a connection, and leave other sockets. The descriptor is closed."""
    with socket.socket(fileno=descriptor) as connection:
        is_tcp = connection.type == socket.SOCK_STREAM
        if not is_tcp or connection.family not in (socket.AF_INET, socket.AF_INET6):
            return
        connection.getpeername()  # fails unless it is connected
        connection.shutdown(socket.SHUT_RDWR)
