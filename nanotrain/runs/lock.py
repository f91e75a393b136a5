"""One job per run folder: an advisory lock on an open file, which the system releases when the process ends.

The file names the owner for the error of a second job. It is never removed: another job may hold it open.
"""

import errno
import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nanotrain.errors import EnvironmentFault
from nanotrain.log import get_logger
from nanotrain.runs.files import disk_fault

LOCK_NAME = "run.lock"
# A restarted job may begin before the system has ended every process of the one before.
WAIT_S, _POLL_S = 3.0, 0.1
_BUSY = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
log = get_logger(__name__)


@contextmanager
def lock_run(folder: Path, *, wait_s: float = WAIT_S) -> Iterator[None]:
    """Hold the lock of a run folder; on a file system without locks, warn and go on.

    Args:
        folder: exists and is writable.
        wait_s: how long to wait for an owner that is ending.

    Raises:
        EnvironmentFault: another process holds it; names that process.
    """
    path = folder / LOCK_NAME
    try:
        file = os.open(path, _OPEN, 0o666)
    except OSError as error:
        raise disk_fault(error, path) from None
    try:
        if _take(file, folder, wait_s=wait_s):
            _write_owner(file, path)
        yield
    finally:
        os.close(file)  # releases the lock


def _take(file: int, folder: Path, *, wait_s: float) -> bool:
    """Take the lock; False on a file system without locks."""
    end = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in _BUSY:
                log.warning(
                    "%s cannot be locked (%s): a second job in it would overwrite this one's files",
                    *(folder, error.strerror),
                )
                return False
        if time.monotonic() >= end:
            raise EnvironmentFault(
                f"the run folder {folder} is in use",
                why=f"{_owner(file)} holds its lock",
                fix="wait for it, end it, or choose another folder with --run-dir",
            )
        time.sleep(_POLL_S)


def _write_owner(file: int, path: Path) -> None:
    owner = {
        "host": platform.node(),
        "pid": os.getpid(),
        "started": datetime.now(UTC).isoformat(" ", timespec="seconds"),
    }
    try:
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(owner).encode() + b"\n", 0)
    except OSError as error:
        raise disk_fault(error, path) from None


def _owner(file: int) -> str:
    """The process that holds the lock, as text."""
    try:
        owner: dict[str, Any] = json.loads(os.pread(file, 4096, 0))
        return f"process {owner['pid']} on {owner['host']}, started {owner['started']},"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
