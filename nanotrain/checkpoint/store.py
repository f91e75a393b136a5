"""The checkpoints folder of a run: which checkpoints are complete, and the renames that commit and delete them.

checkpoints/
  step-00000100/               complete: final name, readable manifest, every file of it present in full size
    manifest.json
    shard-00000-of-00004.safetensors
  step-00000200.tmp/           being written, or left by a killed writer; removed at the next save
  step-00000050.deleted/       being deleted; removed at the next save
  step-00000300.superseded-1/  set aside by a run that resumed from an earlier step: never chosen, never deleted

read_manifest, require_complete          one checkpoint
complete_checkpoints, newest_complete,   a folder of checkpoints; "latest" is always derived, never stored
find_checkpoint
start_writing, commit, discard,          write and delete; a rename is the only operation that commits or deletes
keep_newest, set_aside_after
"""

import os
import re
import shutil
from itertools import count
from pathlib import Path

from nanotrain.checkpoint.manifest import Manifest, NewerFormat, from_json
from nanotrain.errors import CheckpointError, EnvironmentFault
from nanotrain.log import get_logger

MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(r"step-\d{8,}\.tmp")
_LEFTOVER = re.compile(r"step-\d{8,}\.(tmp|deleted)")
log = get_logger(__name__)


def step_folder(folder: Path, step: int) -> Path:
    """The folder of a step's checkpoint.

    >>> step_folder(Path("checkpoints"), 100).name
    'step-00000100'
    """
    return folder / f"step-{step:08d}"


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of one checkpoint.

    Raises:
        CheckpointError: missing or damaged.
        NewerFormat: of a later version.
    """
    file = path / MANIFEST
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "it does not exist" if isinstance(error, FileNotFoundError) else str(error)
        raise CheckpointError(f"{file} cannot be read", why=reason, fix="load an older checkpoint of the run") from None
    return from_json(text, source=str(file))


def require_complete(path: Path) -> Manifest:
    """The manifest of a complete checkpoint; compares file sizes, not checksums.

    Raises:
        CheckpointError: unfinished, no manifest, or a file is missing or has another size.
    """
    if _LEFTOVER.fullmatch(path.name):
        raise CheckpointError(f"{path} is not a finished checkpoint", why="its writer or deleter was killed", fix=_CURE)
    manifest = read_manifest(path)
    for name, size in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path} is incomplete", why=f"{name} is missing", fix=_CURE)
        if (present := file.stat().st_size) != size:
            raise CheckpointError(f"{path} is incomplete", why=f"{name} has {present} of {size} bytes", fix=_CURE)
    return manifest


_CURE = "load an older checkpoint of the run; `nanotrain checkpoint verify` checks one"


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a checkpoints folder, oldest step first; others are skipped silently."""
    return [path for path in _step_folders(folder) if _fault_of(path) is None]


def newest_complete(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step, or None; one warning lists newer ones that are skipped, and why.

    Raises:
        NewerFormat: the newest is of a later format; resuming from an older one would discard its steps.
    """
    skipped = [
        f"{path.name} (it was never finished)" for path in _leftovers(folder) if _UNFINISHED.fullmatch(path.name)
    ]
    found = None
    for path in reversed(_step_folders(folder)):
        fault = _fault_of(path)
        if fault is None:
            found = path
            break
        skipped.append(f"{path.name} ({fault.why or fault.what})")
    if found is not None:
        skipped = [entry for entry in skipped if entry > found.name]
    if skipped:
        chosen = f"using {found.name}" if found else "no complete one is left"
        log.warning("skipped unusable checkpoints in %s: %s; %s", folder, ", ".join(sorted(skipped)), chosen)
    return found


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path names: a complete step folder; or a run or checkpoints folder, for its newest.

    Raises:
        CheckpointError: no such folder, no complete checkpoint in it, or the step folder is not complete.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a checkpoint", why="there is no such folder", fix=_NAMES)
    if path.name.startswith("step-") or (path / MANIFEST).exists():
        require_complete(path)
        return path
    for folder in (path / "checkpoints", path):
        found = newest_complete(folder)
        if found is not None:
            return found
    raise CheckpointError(f"{path} holds no complete checkpoint", why="no step-NNNNNNNN in it is complete", fix=_NAMES)


_NAMES = "name a run folder, its checkpoints folder, or one step-NNNNNNNN of it"


def start_writing(folder: Path, step: int) -> Path:
    """Make the temporary folder of a step, after removing leftovers of earlier writers."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in _leftovers(folder):
        shutil.rmtree(leftover)
    temporary = _temporary(folder, step)
    temporary.mkdir()
    return temporary


def commit(folder: Path, step: int, *, text: str) -> Path:
    """Write the manifest into the temporary folder and rename the folder to its final name.

    Every shard is on the disk already; each fsync precedes the rename that relies on it.
    """
    temporary, final = _temporary(folder, step), step_folder(folder, step)
    with open(temporary / MANIFEST, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(temporary)
    if final.exists():  # the same step again, after a run resumed from an older checkpoint
        os.rename(final, _deleted_name(final))
    os.rename(temporary, final)
    sync_folder(folder)
    shutil.rmtree(_deleted_name(final), ignore_errors=True)
    return final


def discard(folder: Path, step: int) -> None:
    """Remove the temporary folder of a failed save; the next save removes what cannot be removed now."""
    shutil.rmtree(_temporary(folder, step), ignore_errors=True)


def keep_newest(folder: Path, keep_last: int, *, written: Path) -> None:
    """Delete the oldest complete checkpoints but `keep_last`, never the one just written; 0 keeps all.

    A folder is renamed first, so that an interrupted deletion leaves nothing that looks complete. A failed deletion is
    a warning, since the save itself succeeded.
    """
    if keep_last == 0:
        return
    others = [path for path in complete_checkpoints(folder) if path != written]
    for path in others[: max(0, len(others) - (keep_last - 1))]:
        try:
            os.rename(path, _deleted_name(path))
            shutil.rmtree(_deleted_name(path))
        except OSError as error:
            log.warning("could not delete the old checkpoint %s: %s", path, error)


def set_aside_after(folder: Path, step: int) -> list[Path]:
    """Rename the checkpoints of later steps, of which a run that resumes at `step` is not a continuation.

    Otherwise a crash before the run has reached those steps would resume from them.

    Raises:
        EnvironmentFault: the folder cannot be written.
    """
    aside = []
    for path in _step_folders(folder):
        if _step_of(path) <= step:
            continue
        names = (path.with_suffix(f".superseded-{number}") for number in count(1))
        target = next(name for name in names if not name.exists())
        try:
            os.rename(path, target)
        except OSError as error:
            raise EnvironmentFault(
                f"{path} cannot be set aside", why=error.strerror or str(error), fix="choose another train.run_dir"
            ) from error
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
    except NewerFormat:
        raise
    except CheckpointError as error:
        return error
    return None


def _step_folders(folder: Path) -> list[Path]:
    found = [path for path in _entries(folder) if _STEP.fullmatch(path.name)]
    return sorted(found, key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _leftovers(folder: Path) -> list[Path]:
    return sorted(path for path in _entries(folder) if _LEFTOVER.fullmatch(path.name))


def _entries(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def _temporary(folder: Path, step: int) -> Path:
    return step_folder(folder, step).with_suffix(".tmp")


def _deleted_name(path: Path) -> Path:
    return path.with_suffix(".deleted")
