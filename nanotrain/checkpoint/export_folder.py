"""The folder of an export: whole, or not there."""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nanotrain.errors import CheckpointError
from nanotrain.runs.files import disk_fault

FIX = "choose a new folder"


@contextmanager
def export_folder(output: Path, *, nbytes: int) -> Iterator[Path]:
    """Yield a temporary folder to fill, which gets its name when the block succeeds.

    After an error it is removed.

    Args:
        output: the folder; must not exist or be empty.
        nbytes: bytes of the tensors, for which space is checked.

    Raises:
        CheckpointError: `output` has files.
        EnvironmentFault: the disk is full, or the folder cannot be written.
    """
    is_new = not os.path.lexists(output)
    if not is_new:
        _require_empty(output)
    partial = f".partial-{secrets.token_hex(4)}"
    temporary = output / partial
    if is_new:
        temporary = output.with_name(f".{output.name}{partial}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        if shutil.disk_usage(temporary).free < nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield temporary
        if is_new:
            os.rename(temporary, output)
        else:
            _move_files(temporary, output)
    except OSError as error:
        raise disk_fault(error, output, needed=nbytes, fix=FIX) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _require_empty(output: Path) -> None:
    """Check that a folder has no files."""
    if not output.is_dir():
        raise CheckpointError(f"cannot write to {output}", why="it is a file", fix=FIX)
    present = sorted(path.name for path in output.iterdir())
    if present:
        raise CheckpointError(
            f"{output} is not empty",
            why=f"it contains {present[0]}, which would be mixed with the new files or replaced",
            fix=FIX,
        )


def _move_files(temporary: Path, output: Path) -> None:
    """Move the files to their folder; an index that names other files comes last."""
    for child in sorted(temporary.iterdir(), key=_written_at):
        if os.path.lexists(output / child.name):
            # another export into this folder wrote it
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
        os.rename(child, output / child.name)


def _written_at(path: Path) -> tuple[int, bool, str]:
    """Sort key, in the order of writing.

    Files of one clock tick are ordered by name, .metadata last, and iter_N before its tracker.
    """
    return path.stat().st_mtime_ns, path.name.startswith("."), path.name
