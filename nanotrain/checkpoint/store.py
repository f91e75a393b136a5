"""The folder of a run's checkpoints: which are complete, which to take, and how one becomes complete or goes.

checkpoints/
  step-00000100/               complete: final name, a manifest that reads, every file it names in its full size
    manifest.json
    shard-00000-of-00004.safetensors
  step-00000200.tmp/           being written, or left by a writer that died; cleaned at the next save
  step-00000050.deleted/       on its way out; cleaned at the next save
  step-00000300.superseded-1/  a run went back to an earlier step: never chosen, never deleted

read_manifest, require_complete          one checkpoint
complete_checkpoints, newest_complete,   a folder of them; "latest" is always derived, never stored
find_checkpoint
start_writing, commit, discard,          the life of one; a rename is the only step that makes or ends it
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
    """Where the checkpoint of a step lies.

    >>> step_folder(Path("checkpoints"), 100).name
    'step-00000100'
    """
    return folder / f"step-{step:08d}"


def read_manifest(path: Path) -> Manifest:
    """The manifest of one checkpoint.

    Raises:
        CheckpointError: there is none, or it is damaged.
        NewerFormat: it has a later version.
    """
    file = path / MANIFEST
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "it does not exist" if isinstance(error, FileNotFoundError) else str(error)
        raise CheckpointError(f"{file} cannot be read", why=reason, fix="load an older checkpoint of the run") from None
    return from_json(text, source=str(file))


def require_complete(path: Path) -> Manifest:
    """The manifest of a checkpoint that is all there; sizes are looked at, checksums are not.

    Raises:
        CheckpointError: unfinished, no manifest, or a file of it is missing or has another size.
    """
    if _LEFTOVER.fullmatch(path.name):
        raise CheckpointError(f"{path} is no finished checkpoint", why="its writer or deleter died half-way", fix=_CURE)
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
    """The complete checkpoints in a checkpoints folder, oldest step first; says nothing of the others."""
    return [path for path in _step_folders(folder) if _fault_of(path) is None]


def newest_complete(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step, or None; warns once, with the reasons, of newer ones it passed over.

    Raises:
        NewerFormat: the newest is of a later format; going on from an older one would throw its steps away.
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
    """The checkpoint a user means by a path.

    Args:
        path: a step folder, which must then be complete, or a run folder or its checkpoints folder: its newest.

    Raises:
        CheckpointError: nothing there, nothing complete, or the step folder itself is not complete.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is no checkpoint", why="there is no such folder", fix=_NAMES)
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
    """Make the temporary folder of a step, after clearing what earlier writers left."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in _leftovers(folder):
        shutil.rmtree(leftover)
    temporary = _temporary(folder, step)
    temporary.mkdir()
    return temporary


def commit(folder: Path, step: int, *, text: str) -> Path:
    """Write the manifest into the temporary folder and give the folder its final name; what it held is complete then.

    Every shard is on the disk already; each fsync here stands before the rename that relies on it.
    """
    temporary, final = _temporary(folder, step), step_folder(folder, step)
    with open(temporary / MANIFEST, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(temporary)
    if final.exists():  # the same step again, after a run went back to an older checkpoint
        os.rename(final, _dying(final))
    os.rename(temporary, final)
    sync_folder(folder)
    shutil.rmtree(_dying(final), ignore_errors=True)
    return final


def discard(folder: Path, step: int) -> None:
    """Remove the temporary folder of a step that failed; what cannot be removed now is cleared by the next save."""
    shutil.rmtree(_temporary(folder, step), ignore_errors=True)


def keep_newest(folder: Path, keep_last: int, *, written: Path) -> None:
    """Delete the oldest complete checkpoints but `keep_last`, never the one just written; 0 keeps all.

    A folder is renamed before it is emptied: a deletion killed half-way leaves nothing that looks complete. One that
    cannot be deleted is a warning: the save itself succeeded.
    """
    if keep_last == 0:
        return
    others = [path for path in complete_checkpoints(folder) if path != written]
    for path in others[: max(0, len(others) - (keep_last - 1))]:
        try:
            os.rename(path, _dying(path))
            shutil.rmtree(_dying(path))
        except OSError as error:
            log.warning("could not delete the old checkpoint %s: %s", path, error)


def set_aside_after(folder: Path, step: int) -> list[Path]:
    """Rename the checkpoints of later steps, which the run that begins at `step` is not a descendant of.

    Left there, a crash before that run had come as far would resume from them.

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
    """Make the names in a folder survive a power cut."""
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


def _dying(path: Path) -> Path:
    return path.with_suffix(".deleted")
