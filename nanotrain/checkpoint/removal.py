"""Removal of checkpoint folders: only the files that nanotrain writes into them, and the folder if no other is left.

removed name   step-00000050.deleted, so that an interrupted removal leaves nothing that looks complete
foreign files  stay in that folder, with one warning
"""

import os
import re
from itertools import count
from pathlib import Path

from nanotrain.log import get_logger

_OWN_FILE = re.compile(r"manifest\.json|shard-\d{5,}-of-\d{5,}\.safetensors|\.?written-\d{5,}\.json(\.\w+\.partial)?")
log = get_logger(__name__)


class _HoldsForeignFiles(OSError):
    """A folder with content that nanotrain did not write."""


def try_to_remove(path: Path, *, warned: set[Path]) -> None:
    """Remove a folder of nanotrain, or a symbolic link itself; a failure is one warning per entry of `warned`."""
    try:
        _remove(path)
    except OSError as error:
        warn_once(path, error, warned=warned)


def remove_unfinished(path: Path) -> None:
    """Remove what a save leaves, as far as that works now; the next save tries again, with a warning."""
    try_to_remove(path, warned={path})


def warn_once(path: Path, error: OSError, *, warned: set[Path]) -> None:
    """Warn that a path cannot be deleted, unless it is in `warned`; it is added."""
    if path not in warned:
        log.warning("could not delete the old checkpoint %s: %s", path, error.strerror or error)
    warned.add(path)


def deleted_name(path: Path) -> Path:
    """A free name for a folder that is being deleted."""
    names = (path.with_suffix(f".deleted{f'-{number}' if number > 1 else ''}") for number in count(1))
    return next(name for name in names if not os.path.lexists(name))


def _remove(path: Path) -> None:
    if path.is_symlink():  # never what it points to
        path.unlink()
        return
    if not path.exists():
        return
    if not path.is_dir():
        raise _HoldsForeignFiles(0, "it is a file that nanotrain did not write")
    for child in sorted(path.iterdir()):
        if _OWN_FILE.fullmatch(child.name) and (child.is_symlink() or not child.is_dir()):
            child.unlink()
    foreign = sorted(child.name for child in path.iterdir())
    if foreign:
        raise _HoldsForeignFiles(0, f"it holds {foreign[0]}, which nanotrain did not write")
    path.rmdir()
