"""Which complete checkpoints are kept, and removal of the others.

keep_newest        after each save: keeps the newest checkpoints, checkpoints at multiples of an
                   interval, and the last sound one
surplus            the checkpoints that it deletes
prune              `nanotrain checkpoint prune`
try_to_remove      remove only the files that nanotrain writes into a folder, and the folder if no
                   other file is left

A folder is renamed to step-00000050.deleted first, so that an interrupted removal leaves nothing
that looks complete. Foreign files stay in that folder, with one warning.
"""

import os
import re
from collections.abc import Mapping
from functools import cache
from itertools import count
from pathlib import Path

from nanotrain.checkpoint.manifest import NewerFormat
from nanotrain.checkpoint.store import (
    NAMES,
    complete_checkpoints,
    not_finite,
    require_complete,
    require_files,
    step_entries,
    step_of,
)
from nanotrain.checkpoint.stored import MANIFEST, stored_at
from nanotrain.errors import CheckpointError, EnvironmentFault, StorageFault
from nanotrain.log import get_logger

_OWN_FILE = re.compile(
    r"shard-\d{5,}-of-\d{5,}\.safetensors"
    r"|\.?(manifest|object-storage|written-\d{5,})\.json(\.\w+\.partial)?"
)
log = get_logger(__name__)


def keep_newest(
    folder: Path, keep_last: int, *, written: Path, keep_every: int | None = None
) -> None:
    """Delete the complete checkpoints of `surplus`; `keep_last` 0 keeps all.

    A failed deletion is one warning, since the save itself succeeded.
    """
    if not keep_last:
        return
    for path in surplus(folder, keep_last, written=written, keep_every=keep_every):
        deleted = deleted_name(path)
        try:
            os.rename(path, deleted)
        except OSError as error:
            _warn(path, error.strerror)
        else:
            try_to_remove(deleted)


def surplus(
    folder: Path, keep_last: int, *, written: Path, keep_every: int | None = None
) -> list[Path]:
    """The oldest complete checkpoints but `keep_last`.

    The one just written and the newest sound one are never among them. Checkpoints at steps that
    are a multiple of `keep_every` are kept too and not counted. The weights of a run may stop to be
    finite: its last sound checkpoint must outlive all later ones.
    """
    complete = [path for path in step_entries(folder) if path == written or _is_complete(path)]
    others = []
    for path in complete:
        if path != written and (keep_every is None or step_of(path) % keep_every):
            others.append(path)
    oldest = others[: max(0, len(others) - (keep_last - 1))]
    if not oldest:
        return []
    sound = next((path for path in reversed(complete) if not not_finite(path)), None)
    return [path for path in oldest if path != sound]


def _is_complete(path: Path) -> bool:
    """Whether a checkpoint is complete; the files of an unchanged manifest are not read again."""
    try:
        status = os.lstat(path / MANIFEST)
        require_files(path, _files_of(path, status.st_ino, status.st_mtime_ns, status.st_size))
    except NewerFormat:
        raise
    except (OSError, CheckpointError):
        return False
    return True


@cache
def _files_of(path: Path, *version: int) -> Mapping[str, int]:
    """The files of a complete checkpoint; each version of its long manifest is read once."""
    return require_complete(path).files


def prune(path: Path, keep_last: int, *, is_dry: bool = False) -> list[Path]:
    """Delete the `surplus` of a run folder or checkpoints folder and return it.

    Raises:
        CheckpointError: there is no complete checkpoint.
        EnvironmentFault: some cannot be deleted.
    """
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    complete = complete_checkpoints(folder)
    if not complete:
        raise CheckpointError(
            f"{path} holds no complete checkpoint", why="there is nothing to prune", fix=NAMES
        )
    oldest = surplus(folder, keep_last, written=complete[-1])
    if oldest and not is_dry:
        keep_newest(folder, keep_last, written=complete[-1])
    remaining = [step.name for step in oldest if os.path.lexists(step)]
    if remaining and not is_dry:
        gone = ", ".join(step.name for step in oldest if step.name not in remaining) or "none"
        raise EnvironmentFault(
            f"{', '.join(remaining)} could not be deleted",
            why=f"the warnings name the reasons; deleted: {gone}",
            fix=f"make {folder} writable",
        )
    return oldest


def try_to_remove(path: Path, *, is_quiet: bool = False) -> None:
    """Remove a folder of nanotrain, or a symbolic link itself; a failure is one warning per path.

    Args:
        path: the folder; it need not exist.
        is_quiet: whether a failure is no warning: the next save tries again, with one.
    """
    try:
        _remove(path)
    except (OSError, StorageFault) as error:
        if not is_quiet:
            _warn(path, error.strerror if isinstance(error, OSError) else str(error))


@cache
def _warn(path: Path, reason: str | None) -> None:
    """Warn that a path cannot be deleted, once."""
    log.warning("could not delete the old checkpoint %s: %s", path, reason)


def deleted_name(path: Path) -> Path:
    """A free name for a folder that is being deleted."""
    name = path.with_suffix(".deleted")
    for number in count(2):
        if not os.path.lexists(name):
            break
        name = path.with_suffix(f".deleted-{number}")
    return name


def _remove(path: Path) -> None:
    """Remove a step folder, and first its objects in a store.

    Raises:
        OSError: the folder has files that nanotrain did not write.
    """
    if path.is_symlink():  # never what it points to
        path.unlink()
        return
    if not path.exists():
        return
    if not path.is_dir():
        raise OSError(0, "it is a file that nanotrain did not write")
    stored = stored_at(path) if ".deleted" in path.name else None
    if stored is not None:
        stored.delete()  # first: this folder is the record that it has to be done
    _remove_own_files(path)
    foreign = sorted(child.name for child in path.iterdir())
    if foreign:
        raise OSError(0, f"it holds {foreign[0]}, which nanotrain did not write")
    path.rmdir()


def _remove_own_files(folder: Path) -> None:
    for child in sorted(folder.iterdir()):
        is_file = child.is_symlink() or not child.is_dir()
        if is_file and _OWN_FILE.fullmatch(child.name):
            child.unlink()
