"""Advisory locks on open files: one job per run folder or corpus.

The system releases a lock when its process ends.

lock_run     of a run folder; its file is never removed, as it marks the folder of a run
is_in_use    whether a process holds the lock of a run folder
hold_lock    of any file, which names the owner for the error of a second job
"""

import errno
import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nanotrain.errors import EnvironmentFault
from nanotrain.log import get_logger
from nanotrain.runs.files import disk_errors

LOCK_NAME = "run.lock"
# A restarted job may begin before the system has ended every process of the previous job.
WAIT_S, _POLL_S = 3.0, 0.1
_BUSY = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_FIX = "choose another folder for it"
_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
log = get_logger(__name__)


class InUse(EnvironmentFault):
    """A folder or corpus that another process has; nothing of it may be touched."""


def lock_run(folder: Path, *, wait_s: float = WAIT_S) -> AbstractContextManager[None]:
    """Hold the lock of a run folder, as `hold_lock` does; the folder exists and is writable."""
    fix = "wait for it, end it, or choose another folder with --run-dir"
    return hold_lock(folder / LOCK_NAME, what=f"the run folder {folder}", fix=fix, wait_s=wait_s)


def is_in_use(folder: Path) -> bool:
    """Whether a job has a run folder; True where the file system cannot tell."""
    try:
        file = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)  # releases the lock
    return False


@contextmanager
def hold_lock(
    path: Path, *, what: str, fix: str, wait_s: float = WAIT_S, is_removed: bool = False
) -> Iterator[None]:
    """Hold a lock; on a file system without locks, only warn.

    Args:
        path: the lock file; created if missing.
        what: name of the locked folder or corpus, for messages.
        fix: the cure for a second job.
        wait_s: seconds to wait for an owner that is ending.
        is_removed: whether the lock file is removed in the end.

    Raises:
        EnvironmentFault: another process holds it; names that process.
    """
    file, is_locked = _take(path, what=what, fix=fix, end=time.monotonic() + wait_s)
    try:
        if is_locked:
            with disk_errors(path, fix=_FIX):
                _write_owner(file)
        yield
    finally:
        # before the release: a job that waits for this file finds that it has no name any more
        if is_removed:
            with suppress(OSError):  # the folder may be gone
                path.unlink()
        if is_locked:  # it names no owner while there is none
            with suppress(OSError):
                os.ftruncate(file, 0)
        os.close(file)  # releases the lock


def _take(path: Path, *, what: str, fix: str, end: float) -> tuple[int, bool]:
    """Open the file and take the lock; False on a file system without locks."""
    while True:
        with disk_errors(path, fix=_FIX):
            file = os.open(path, _OPEN, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # ESTALE: an owner on another host has removed the file
            if error.errno not in (*_BUSY, errno.ESTALE):
                log.warning(
                    "%s cannot be locked (%s): a second job in it would overwrite this one's files",
                    *(what, error.strerror),
                )
                return file, False
            why = f"{_owner(file)} holds its lock"
        else:
            if _is_at(file, path):
                return file, True
            why = "other processes take its lock in turn"
        os.close(file)
        if time.monotonic() >= end:
            raise InUse(f"{what} is in use", why=why, fix=fix)
        time.sleep(_POLL_S)


def _is_at(file: int, path: Path) -> bool:
    """Whether a path still names an open file; not after an owner has removed it."""
    try:
        return os.path.samestat(os.fstat(file), os.lstat(path))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return False


def _write_owner(file: int) -> None:
    """Write host and process of this program into the lock file."""
    owner = {
        "host": platform.node(),
        "pid": os.getpid(),
        "started": datetime.now(UTC).isoformat(" ", timespec="seconds"),
    }
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(owner).encode() + b"\n", 0)


def _owner(file: int) -> str:
    """The process that holds the lock, as text."""
    try:
        owner: dict[str, Any] = json.loads(os.pread(file, 4096, 0))
        return f"process {owner['pid']} on {owner['host']}, started {owner['started']},"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
