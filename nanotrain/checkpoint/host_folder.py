"""The folder of a run in the memory file system of a host, and the removal of folders of dead runs.

    /dev/shm/nanotrain-1000/HOST/RUN/    0700, of user 1000; RUN: hash of the run's path and start
        in-use                           locked while the run is running
        step-00000040/                   manifest.json, shards of this host's ranks and of partners

The folder outlives the processes of a run, so that a restart finds it, and not the host.
"""

import fcntl
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nanotrain.errors import EnvironmentFault
from nanotrain.log import get_logger
from nanotrain.runs.files import disk_errors

IN_USE = "in-use"
DEAD_S = 24 * 3600.0  # a run that nobody has restarted for so long does not come back
_FIX = "choose another folder with --memory-checkpoint-dir"
log = get_logger(__name__)


def run_key(address: str, first_start: str) -> str:
    """The name of a run's folder; a run that begins anew in the same run folder has another one.

    Args:
        address: the run folder.
        first_start: the row of its first start.
    """
    return f"{_digest(address)}-{_digest(first_start)}"


def host_root(base: Path, host: str) -> Path:
    """The folder of this user for a host, made if it is missing.

    Raises:
        EnvironmentFault: the memory file system is missing, or the folder cannot be made or is
            somebody else's: others may write to a memory file system too.
    """
    if not base.is_dir():
        why = "checkpoints in memory need a memory file system on every host"
        raise EnvironmentFault(f"{base} is no folder", why=why, fix=_FIX)
    root = base / f"nanotrain-{os.getuid()}"
    with disk_errors(root, fix=_FIX):
        with suppress(FileExistsError):
            root.mkdir(mode=0o700)
        status = os.lstat(root)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        why = f"it is no folder of user {os.getuid()}"
        raise EnvironmentFault(f"{root} cannot be used", why=why, fix=_FIX)
    folder = root / host.replace("/", "_")
    with disk_errors(folder, fix=_FIX):
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Make a folder of a run, and mark its run as running until the end of the block."""
    with disk_errors(folder, fix=_FIX):
        folder.mkdir(mode=0o700, exist_ok=True)
        handle = os.open(folder / IN_USE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with suppress(OSError):  # no other running run has this folder: it holds its run folder
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def remove_dead(root: Path, *, address: str, key: str | None) -> list[Path]:
    """Remove the folders of runs that will not be restarted, and return them.

    A run is dead if another one began anew in the same run folder, or if it had no process for a
    day.

    Args:
        root: the folder of `host_root`.
        address: the run folder of this run.
        key: the folder of this run, which stays; None: it has none.
    """
    removed = []
    for folder in sorted(root.iterdir()):
        if folder.name == key or not folder.is_dir() or _is_running(folder):
            continue
        is_older_start = folder.name.startswith(_digest(address))
        age_s = time.time() - max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
        if is_older_start or age_s > DEAD_S:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
            log.info("removed memory checkpoints of a dead run: %s", folder)
    return removed


def remove_folder(folder: Path) -> None:
    """Remove the folder of a run, and the folders above it that are then empty."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # other runs of this user or hosts are in it
        folder.parent.rmdir()
        folder.parent.parent.rmdir()


def _is_running(folder: Path) -> bool:
    """Whether a process holds the mark of a folder."""
    try:
        handle = os.open(folder / IN_USE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(handle)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
