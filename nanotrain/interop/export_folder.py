"""The folder of an export through torch.distributed.checkpoint: whole, or not there."""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from nanotrain.checkpoint.store import require_space
from nanotrain.errors import CheckpointError
from nanotrain.runs.files import disk_fault


@contextmanager
def export_folder(output: Path, *, nbytes: int) -> Iterator[Path]:
    """Yield a temporary folder to fill; its content gets its name when the block succeeds, and is removed when not.

    Args:
        output: must not exist or be empty.
        nbytes: of the tensors, for which space is checked.

    Raises:
        CheckpointError: `output` has files, or the error of the block inside torch's wrapper.
        EnvironmentFault: the disk is full, or the folder cannot be written.
    """
    is_new = not os.path.lexists(output)
    if not is_new and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(f"{output} is not empty", why="nothing is overwritten", fix="name another folder")
    token = secrets.token_hex(4)
    temporary = output.with_name(f".{output.name}.partial-{token}") if is_new else output / f".partial-{token}"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        require_space(temporary, nbytes)
        with _errors_of_torch():
            yield temporary
        if is_new:
            os.rename(temporary, output)
        else:
            for child in sorted(temporary.iterdir(), key=_written_at):  # what names other files comes after them
                os.rename(child, output / child.name)
    except OSError as error:
        raise disk_fault(error, output, fix="name another folder") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _written_at(path: Path) -> tuple[int, bool, str]:
    """Sorts files as they were written; of one clock tick, .metadata last, and iter_N before its tracker."""
    return path.stat().st_mtime_ns, path.name.startswith("."), path.name


@contextmanager
def _errors_of_torch() -> Iterator[None]:
    """Raise the error that torch wraps; where its writer of archives fails, that of a full disk."""
    try:
        yield
    except (CheckpointException, RuntimeError) as error:
        wrapped = error.failures if isinstance(error, CheckpointException) else {}
        cause = next((failure for failure, _ in wrapped.values()), error)
        if isinstance(cause, RuntimeError) and "inline_container" in str(cause):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
        raise cause from None
