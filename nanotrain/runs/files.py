"""Files that nanotrain writes: complete or absent, with the user's umask, not through links.

disk_fault        an OSError as an error that names the path, the free space and the needed space
write_text        replace a file; a symbolic link is replaced, not followed
open_append       open a file to append lines, unbuffered; `write_all` writes them
disk_errors       a block whose OSErrors become such errors
make_folder       make a folder with a marker, which nanotrain may remove later
remove_folder     remove such a folder
swap_names        swap two names in one operation of the file system
"""

import ctypes
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from nanotrain.errors import EnvironmentFault, StorageFault

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a pipe without a reader fails instead of waiting
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
OTHER_FOLDER = "choose another folder with --run-dir"
MARKER = ".made-by-nanotrain"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
# the kernel, the C library or the file system (NFS, some FUSE) has no such operation
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)


class FolderVanished(StorageFault):
    """A folder that was removed, or whose disk went away, while it was in use."""


def disk_fault(
    error: OSError, path: Path, *, needed: int | None = None, fix: str = OTHER_FOLDER
) -> StorageFault:
    """The error of a failed write.

    Args:
        error: error of the operating system.
        path: the file or folder that was written.
        needed: bytes of the failed write, if known.
        fix: the cure besides freeing space.
    """
    path = Path(path)
    if error.errno in (errno.ENOENT, errno.ESTALE) and not path.parent.is_dir():
        return FolderVanished(
            f"{path.parent} does not exist any more",
            why="it was removed or renamed, or its disk is gone, while it was in use",
            fix="mount or restore it and start the run again",
        )
    if error.errno == errno.ELOOP:
        return StorageFault(
            f"{path} is a symbolic link",
            why="files are not written through links",
            fix="remove the link",
        )
    why = reason(error, path, needed=needed)
    cure = f"free space, or {fix}" if error.errno in _NO_SPACE else fix
    return StorageFault(f"{path} cannot be written", why=why, fix=cure)


@contextmanager
def disk_errors(
    path: Path, *, needed: int | None = None, fix: str = OTHER_FOLDER
) -> Iterator[None]:
    """Raise OSErrors of the block as the error of `disk_fault`."""
    try:
        yield
    except OSError as error:
        raise disk_fault(error, path, needed=needed, fix=fix) from None


def reason(error: OSError, path: Path, *, needed: int | None = None) -> str:
    """Why a write failed; for a full disk or a size limit with the needed and the free bytes."""
    if error.errno not in _NO_SPACE:
        return error.strerror or str(error)
    limit = (
        " (the limit `ulimit -f` of this shell, or of the file system)"
        if error.errno == errno.EFBIG
        else ""
    )
    demand = f"{needed:,} bytes needed, " if needed is not None else ""
    return f"{error.strerror}{limit}: {demand}{free_space(path)}"


def free_space(path: Path) -> str:
    """The free space of the disk that holds a path, as text."""
    folder = next(
        (folder for folder in (path, *path.absolute().parents) if folder.is_dir()), Path("/")
    )
    try:
        status = os.statvfs(folder)
        if status.f_files and not status.f_favail:
            return (
                f"no inode free in {folder}, which has {status.f_files:,}: no file can be created"
            )
        return f"{status.f_bavail * status.f_frsize:,} bytes free in {folder}"
    except OSError:
        return f"free space of {folder} unknown"


def write_text(path: Path, text: str, *, fix: str = OTHER_FOLDER) -> None:
    """Replace a file by `text` in UTF-8; the file has either its old or its new content.

    Raises:
        EnvironmentFault: it cannot be written; the old file is unchanged.
    """
    write_bytes(path, text.encode("utf-8", "backslashreplace"), fix=fix)


def require_no_link(folder: Path) -> None:
    """Check that a folder is no symbolic link, through which files elsewhere would be replaced.

    Raises:
        StorageFault: it is one.
    """
    if folder.is_symlink():
        raise disk_fault(OSError(errno.ELOOP, ""), folder)


def write_bytes(path: Path, data: bytes, *, fix: str = OTHER_FOLDER) -> None:
    """`write_text` for bytes."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with os.fdopen(os.open(partial, _NEW_FILE, 0o666), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):  # on a read-only disk even a missing file cannot be removed
            partial.unlink()
        raise disk_fault(error, path, needed=len(data), fix=fix) from None


def open_append(path: Path) -> BinaryIO:
    """Open a file to append bytes, unbuffered: a failed write leaves nothing to write at exit.

    Raises:
        EnvironmentFault: it cannot be opened, or is a symbolic link.
    """
    with disk_errors(path):
        return os.fdopen(os.open(path, _APPEND, 0o666), "ab", buffering=0)


def write_all(file: BinaryIO, data: bytes) -> None:
    """Write all bytes to an unbuffered file.

    On a nearly full disk one `write` may write a part without an error.
    """
    written = 0
    while written < len(data):
        written += file.write(data[written:]) or 0


def make_folder(path: Path, *, fix: str) -> None:
    """Make a folder that nanotrain may remove later, or accept one that it made before.

    Args:
        path: the folder.
        fix: the cure where the folder has other content.

    Raises:
        EnvironmentFault: the folder is not empty and was not made by nanotrain, or it cannot be
            made.
    """
    with disk_errors(path / MARKER, fix=fix):
        path.mkdir(parents=True, exist_ok=True)
        if not is_own(path):
            if path.is_symlink() or any(path.iterdir()):
                raise EnvironmentFault(
                    f"{path} is not a folder of nanotrain",
                    why=f"it has content and no {MARKER} in it",
                    fix=fix,
                )
            os.close(os.open(path / MARKER, _NEW_FILE, 0o666))


def is_own(path: Path) -> bool:
    """Whether `make_folder` made a folder: a folder, not a link, with a marker file in it."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode) and stat.S_ISREG((path / MARKER).lstat().st_mode)
    except OSError:
        return False


def remove_folder(path: Path) -> None:
    """Remove a folder that `make_folder` made, the marker last; any other is left as it is."""
    if not is_own(path):
        return
    for child in path.iterdir():
        if child.name == MARKER:
            continue
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()
    (path / MARKER).unlink()
    path.rmdir()


def swap_names(first: Path, second: Path) -> bool:
    """Swap two existing files or folders, so that neither name is missing at any moment.

    Returns:
        False if the system does not support it; then nothing has changed.

    Raises:
        OSError: one of them is missing, or the folder cannot be written.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    arguments = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    if libc.renameat2(*arguments) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))
