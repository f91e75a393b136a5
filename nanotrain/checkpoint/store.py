"""The checkpoints folder of a run: which checkpoints are complete, and the renames that commit them.

checkpoints/
  step-00000100/               complete: final name, readable manifest, every file of it present in full size
    manifest.json
    shard-00000-of-00004.safetensors
  step-00000200.tmp/           being written, or left by a killed writer; removed at the next save
  step-00000050.deleted/       being deleted; removed at the next save
  step-00000150.replaced/      the older of two saves; counts as step-00000150 while that is missing
  step-00000300.superseded-1/  set aside by a run that resumed from an earlier step: never chosen, never deleted

read_manifest, require_complete          one checkpoint
complete_checkpoints, newest_complete,   a folder of checkpoints; "latest" is always derived, never stored
checkpoint_to_resume, find_checkpoint, find_manifest
require_space, start_writing, commit,    write and set aside; a rename is the only operation that commits
discard, set_aside_after
"""

import errno
import os
import re
import shutil
import stat
from collections.abc import Mapping
from itertools import count
from pathlib import Path

from nanotrain.checkpoint.manifest import DamagedCheckpoint, Manifest, NewerFormat, damaged, from_json
from nanotrain.checkpoint.removal import deleted_name, remove_unfinished, try_to_remove
from nanotrain.errors import CheckpointError
from nanotrain.log import get_logger
from nanotrain.quantities import step_name
from nanotrain.runs.files import disk_errors
from nanotrain.runs.swap_names import swap_names
from nanotrain.untrusted import read_file, unreadable

MANIFEST = "manifest.json"
REPLACED = ".replaced"
NAMES = "name a run folder, its checkpoints folder, or one step-NNNNNNNN of it"
_STEP = re.compile(r"step-(\d{8,})")
_STEP_OF_ANY = re.compile(r"step-(\d{8,})(?:\..*)?")
_UNFINISHED = re.compile(r"step-\d{8,}\.tmp")
_LEFTOVER = re.compile(r"step-\d{8,}\.(tmp|deleted(-\d+)?)")
_REPLACED = re.compile(r"step-\d{8,}\.replaced")
log = get_logger(__name__)


def step_folder(folder: Path, step: int) -> Path:
    """The folder of a step's checkpoint.

    >>> step_folder(Path("checkpoints"), 100).name
    'step-00000100'
    """
    return folder / step_name(step)


def temporary_folder(folder: Path, step: int) -> Path:
    """The folder of a save until it is committed."""
    return step_folder(folder, step).with_suffix(".tmp")


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of one checkpoint.

    Raises:
        CheckpointError: missing or damaged.
        NewerFormat: of a later version.
    """
    file = path / MANIFEST
    try:
        text = read_file(file, follows_links=False).decode()
    except (OSError, ValueError) as error:
        raise damaged(f"{file} cannot be read", why=unreadable(error), path=path) from None
    manifest = from_json(text, source=str(file))
    named = _STEP_OF_ANY.fullmatch(path.name)
    if named and int(named[1]) != manifest.step:
        why = f"step is {manifest.step}, the folder is named {path.name}"
        raise damaged(f"{file} belongs to another folder", why=why, path=path)
    return manifest


def require_complete(path: Path) -> Manifest:
    """The manifest of a complete checkpoint; compares file sizes, not checksums.

    Raises:
        CheckpointError: unfinished, no manifest, or a file is missing or has another size.
    """
    if _LEFTOVER.fullmatch(path.name):
        raise damaged(f"{path} is not a finished checkpoint", why="its writer or deleter was killed", path=path)
    manifest = read_manifest(path)
    require_files(path, manifest.files)
    return manifest


def require_files(path: Path, files: Mapping[str, int]) -> None:
    """Check that every file of a checkpoint is there in full size; `files` are sizes in bytes by name.

    Raises:
        CheckpointError: one is missing or damaged.
    """
    for name, size in files.items():
        try:
            status = os.lstat(path / name)
        except OSError as error:
            why = f"{name} is missing" if error.errno == errno.ENOENT else f"{name}: {error.strerror}"
            raise damaged(f"{path} is incomplete", why=why, path=path) from None
        if not stat.S_ISREG(status.st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "no regular file"
            raise damaged(f"{path} is incomplete", why=f"{name} is {kind}", path=path)
        if status.st_size != size:
            raise damaged(f"{path} is incomplete", why=f"{name} has {status.st_size} of {size} bytes", path=path)


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a checkpoints folder, oldest step first; others are skipped silently."""
    return [path for path in step_entries(folder) if _fault_of(path) is None]


def newest_complete(folder: Path, *, below: int | None = None) -> Path | None:
    """The complete checkpoint of the highest step, or None; one warning lists newer ones that are skipped, and why.

    Args:
        folder: checkpoints folder of a run.
        below: consider only steps below this one.

    Raises:
        NewerFormat: the newest is of a later format; resuming from an older one would discard its steps.
    """
    found, skipped = _newest(folder, below=below)
    if skipped:
        chosen = f"using {found.name}" if found else "no complete one is left"
        log.warning("skipped unusable checkpoints in %s: %s; %s", folder, ", ".join(sorted(skipped)), chosen)
    return found


def checkpoint_to_resume(folder: Path, *, below: int | None = None) -> Path | None:
    """`newest_complete`; None only where no checkpoint was ever finished.

    Raises:
        DamagedCheckpoint: there are checkpoints and none is complete: starting at step 0 would hide that.
    """
    found = newest_complete(folder, below=below)
    if found is None and any(_fault_of(path) for path in step_entries(folder)):
        raise DamagedCheckpoint(
            f"no checkpoint in {folder} can be used",
            why="; ".join(sorted(_newest(folder, below=None)[1])),
            fix="restore one of them, load another with --load FOLDER, or start again at step 0 with --no-auto-resume, "
            "which renames them and deletes none",
        )
    return found


def find_checkpoint(path: Path) -> Path:
    """The step folder of `find_manifest`, with its errors."""
    return find_manifest(path)[0]


def find_manifest(path: Path) -> tuple[Path, Manifest]:
    """The step folder that a path names, and its manifest: that folder; or a run or checkpoints folder, for its newest.

    Raises:
        DamagedCheckpoint: that checkpoint is not complete; an older one is never taken in its place.
        CheckpointError: no such folder, or no checkpoint in it.
    """
    return (found := named_checkpoint(path)), require_complete(found)


def named_checkpoint(path: Path) -> Path:
    """The step folder of `find_manifest`, whatever is in it; raises only where there is none."""
    if not path.is_dir():
        why = "it is a file" if path.is_file() else "there is no such folder"
        raise CheckpointError(f"{path} is not a checkpoint", why=why, fix=NAMES)
    if path.name.startswith("step-") or (path / MANIFEST).exists():
        return path
    for folder in (path / "checkpoints", path):
        if entries := step_entries(folder):
            return entries[-1]
    raise CheckpointError(f"{path} holds no complete checkpoint", why="no step-NNNNNNNN in it is complete", fix=NAMES)


def require_space(folder: Path, nbytes: int) -> None:
    """Check that a file system has space for a checkpoint.

    Raises:
        OSError: ENOSPC, with the needed bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        text = f"{os.strerror(errno.ENOSPC)}: a checkpoint needs {nbytes:,} bytes"
        raise OSError(errno.ENOSPC, text, str(folder))


def start_writing(folder: Path, step: int, *, warned: set[Path]) -> Path:
    """Make the temporary folder of a step, after removing leftovers of earlier writers.

    A leftover that cannot be removed is one warning per entry of `warned`, which grows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in _leftovers(folder):
        try_to_remove(leftover, warned=warned)
    temporary = temporary_folder(folder, step)
    if os.path.lexists(temporary):
        os.rename(temporary, deleted_name(temporary))  # it holds files of others, which stay
    temporary.mkdir()
    return temporary


def commit(folder: Path, step: int, *, text: str) -> Path:
    """Write the manifest into the temporary folder and rename the folder to its final name.

    Every shard is on the disk already; each fsync precedes the rename that relies on it.
    """
    temporary, final = temporary_folder(folder, step), step_folder(folder, step)
    write_manifest(temporary, text)
    if not os.path.lexists(final):
        os.rename(temporary, final)
        sync_folder(folder)
        return final
    # The same step again, after a rollback: the name must not be missing when this process is killed.
    replaced = final.with_suffix(REPLACED)
    if swap_names(temporary, final):
        sync_folder(folder)
        os.rename(temporary, deleted_name(final))
    else:
        remove_unfinished(replaced)
        if os.path.lexists(replaced):
            os.rename(replaced, deleted_name(replaced))  # it holds files of others too
        os.rename(final, replaced)  # from here to the next line it counts under this name
        os.rename(temporary, final)
        sync_folder(folder)
    for leftover in _leftovers(folder):
        if step_of(leftover) == step:
            remove_unfinished(leftover)
    return final


def write_manifest(folder: Path, text: str) -> None:
    """Write the manifest of a folder whose shards are on the disk, and fsync both."""
    path = folder / MANIFEST
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # a failed write names no file
        needed = f": {len(text):,} bytes needed" if error.errno == errno.ENOSPC else ""
        raise OSError(error.errno, f"{error.strerror}{needed}", str(path)) from None
    sync_folder(folder)


def discard(folder: Path, step: int) -> None:
    """Remove the temporary folder of a failed save; the next save removes what cannot be removed now."""
    remove_unfinished(temporary_folder(folder, step))


def set_aside_after(folder: Path, step: int) -> list[Path]:
    """Rename the checkpoints of later steps, of which a run that resumes at `step` is not a continuation.

    Otherwise a crash before the run has reached those steps would resume from them.

    Raises:
        EnvironmentFault: the folder cannot be written.
    """
    aside = []
    for path in [path for path in step_entries(folder) if step_of(path) > step]:
        names = (path.with_suffix(f".superseded-{number}") for number in count(1))
        target = next(name for name in names if not os.path.lexists(name))
        with disk_errors(path, fix="choose another folder with --run-dir"):
            os.rename(path, target)
        aside.append(target)
    return aside


def sync_folder(folder: Path) -> None:
    """fsync a folder, so that its file names survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _fault_of(path: Path) -> CheckpointError | None:
    try:
        require_complete(path)
        return None
    except NewerFormat:
        raise
    except CheckpointError as error:
        return error


def _newest(folder: Path, *, below: int | None) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint, and what is newer than it and not complete, with the reasons."""
    found, skipped = None, []
    for path in reversed([path for path in step_entries(folder) if below is None or step_of(path) < below]):
        fault = _fault_of(path)
        if fault is None:
            found = path
            break
        skipped.append(f"{path.name} ({fault.why or fault.what})")
    unfinished = [path for path in _leftovers(folder) if _UNFINISHED.fullmatch(path.name) and below is None]
    newer = [path for path in unfinished if found is None or step_of(path) > step_of(found)]
    return found, skipped + [f"{path.name} (it was never finished)" for path in newer]


def step_entries(folder: Path) -> list[Path]:
    """Everything with the name of a step, oldest first; files and links too, which are then found damaged or not."""
    entries = _entries(folder)
    replaced = [path for path in entries if _REPLACED.fullmatch(path.name) and not _is_replaced(path)]
    return sorted(replaced + [path for path in entries if _STEP.fullmatch(path.name)], key=step_of)


def _is_replaced(path: Path) -> bool:
    """Whether the folder exists for which this one was set aside; not after a kill between the renames of `commit`."""
    return os.path.lexists(path.with_suffix(""))


def step_of(path: Path) -> int:
    """The step of a folder by its name."""
    return int(path.stem.removeprefix("step-"))


def _leftovers(folder: Path) -> list[Path]:
    entries = _entries(folder)
    replaced = [path for path in entries if _REPLACED.fullmatch(path.name) and _is_replaced(path)]
    return sorted(replaced + [path for path in entries if _LEFTOVER.fullmatch(path.name)])


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
