"""The checkpoints folder of a run: which checkpoints are complete.

checkpoints/
  step-00000100/               complete: final name, readable manifest, every file of it present in full size
    manifest.json
    shard-00000-of-00004.safetensors
  step-00000200.tmp/           being written, or left by a killed writer; removed at the next save
  step-00000050.deleted/       being deleted; removed at the next save
  step-00000150.replaced/      the older of two saves; counts as step-00000150 while that is missing
  step-00000300.superseded-1/  set aside by a run that resumed from an earlier step: never chosen, never deleted

read_manifest, require_complete          one checkpoint
saved_config, not_finite, file_sizes     configuration, unsound tensors and files in a manifest, from its first lines
complete_checkpoints, newest_complete,   a folder of checkpoints; "latest" is always derived, never stored
checkpoint_to_resume, find_checkpoint, find_manifest
"""

import errno
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanotrain.checkpoint.manifest import (
    FORMAT,
    VERSION,
    DamagedCheckpoint,
    Manifest,
    NewerFormat,
    damaged,
    from_json,
)
from nanotrain.checkpoint.stored import MANIFEST, stored_at
from nanotrain.errors import CheckpointError
from nanotrain.log import get_logger
from nanotrain.quantities import count_of, step_name
from nanotrain.untrusted import object_of, parse_json, read_file, unreadable

NAMES = "name a run folder, its checkpoints folder, or one step-NNNNNNNN of it"
_NAME = re.compile(r"step-(\d{8,})(?:\.(.*))?")  # step, and what became of the folder
LEFTOVER = ("tmp", "deleted", "was replaced")
# as `to_json` writes it; JSON text has no line break in a value
_RECORDS = re.compile(rb',\s*"tensors": \{\n')
log = get_logger(__name__)


def step_folder(folder: Path, step: int) -> Path:
    """The folder of a step's checkpoint.

    >>> step_folder(Path("checkpoints"), 100).name
    'step-00000100'
    """
    return folder / step_name(step)


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of one checkpoint.

    Raises:
        CheckpointError: the manifest is missing or damaged.
        NewerFormat: it is of a later version.
    """
    file = path / MANIFEST
    try:
        text = read_file(file, follows_links=False).decode()
    except (OSError, ValueError) as error:
        raise damaged(f"{file} cannot be read", why=unreadable(error), path=path) from None
    manifest = from_json(text, source=str(file))
    named = _NAME.fullmatch(path.name)
    if named and int(named[1]) != manifest.step:
        why = f"step is {manifest.step}, the folder is named {path.name}"
        raise damaged(f"{file} belongs to another folder", why=why, path=path)
    return manifest


def saved_config(path: Path) -> Mapping[str, Any] | None:
    """The configuration of the run that wrote a step folder; None if only its whole manifest can
    show it.

    What a rank needs before its process groups exist. The records of the chunks come last: on 1,024
    ranks they are 36 to 60 MB, which take 2 s of CPU time and 0.6 GB of memory to read and check;
    the first lines take 0.5 ms (measured). The checksum covers all of the manifest, so these lines
    are unverified; the first rank verifies them when the checkpoint is loaded.
    """
    config = _first_lines(path).get("config")
    return config if isinstance(config, dict) else None


def not_finite(path: Path) -> list[str]:
    """The tensors with values that are not finite in a complete checkpoint; empty where nobody
    looked.
    """
    names = _first_lines(path).get("not_finite")
    return names if isinstance(names, list) else []


def file_sizes(path: Path) -> dict[str, int]:
    """The files in the manifest of a checkpoint, with their sizes in bytes."""
    files = _first_lines(path).get("files")
    return files if isinstance(files, dict) else {}


def describe_not_finite(names: Sequence[str]) -> str:
    """The tensors of `not_finite` as text.

    >>> describe_not_finite(["model/embedding.weight", "model/head.weight"])
    '2 tensors are not finite, the first is model/embedding.weight'
    """
    return f"{count_of(len(names), 'tensor', verb='is')} not finite, the first is {names[0]}"


def _first_lines(path: Path) -> dict[str, Any]:
    """The fields of a manifest before the records of its chunks; empty if they cannot be read or
    are of a version.
    """
    try:
        head = _RECORDS.split(
            read_file(path / MANIFEST, follows_links=False, until=_RECORDS), maxsplit=1
        )
        body = object_of(parse_json(head[0] + b"}", allow_nan=True), "it")
    except (OSError, ValueError):
        return {}
    is_known = len(head) == 2 and (body.get("format"), body.get("version")) == (FORMAT, VERSION)
    return body if is_known else {}


def require_complete(path: Path) -> Manifest:
    """The manifest of a complete checkpoint; compares file sizes, not checksums.

    Raises:
        CheckpointError: unfinished, no manifest, or a file is missing or has another size.
    """
    if _ending(path) in LEFTOVER:
        raise damaged(
            f"{path} is not a finished checkpoint",
            why="its writer or deleter was killed",
            path=path,
        )
    manifest = read_manifest(path)
    require_files(path, manifest.files)
    return manifest


def require_files(path: Path, files: Mapping[str, int]) -> None:
    """Check that every file of a checkpoint is there in full size; `files` are sizes in bytes by
    name.

    Raises:
        CheckpointError: one is missing or damaged.
    """
    stored = stored_at(path)
    for name, size in files.items():
        try:
            status = os.lstat(path / name)
        except OSError as error:
            if error.errno == errno.ENOENT and stored and name in stored.sizes:
                if stored.sizes[name] != size:
                    why = f"{name} has {stored.sizes[name]} of {size} bytes in {stored.remote}"
                    raise damaged(f"{path} is incomplete", why=why, path=path) from None
                continue
            why = (
                f"{name} is missing" if error.errno == errno.ENOENT else f"{name}: {error.strerror}"
            )
            raise damaged(f"{path} is incomplete", why=why, path=path) from None
        if not stat.S_ISREG(status.st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "no regular file"
            raise damaged(f"{path} is incomplete", why=f"{name} is {kind}", path=path)
        if status.st_size != size:
            raise damaged(
                f"{path} is incomplete",
                why=f"{name} has {status.st_size} of {size} bytes",
                path=path,
            )


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a checkpoints folder, oldest step first; others are skipped
    silently.
    """
    return [path for path in step_entries(folder) if _fault_of(path) is None]


def newest_complete(folder: Path, *, below: int | None = None) -> Path | None:
    """The sound checkpoint of the highest step, or None; one warning lists newer ones that are
    skipped, and why.

    Sound is a complete one whose values are all finite; where none is, the newest complete one is
    taken.

    Args:
        folder: checkpoints folder of a run.
        below: the step below which all considered steps are; None for no bound.

    Raises:
        NewerFormat: the newest is of a later format; resuming from an older one would discard its
            steps.
    """
    newest, skipped = _newest(folder, below=below)
    if skipped:
        chosen = f"using {newest.name}" if newest else "no complete one is left"
        log.warning(
            "skipped unusable checkpoints in %s: %s; %s", folder, ", ".join(sorted(skipped)), chosen
        )
    return newest


def checkpoint_to_resume(folder: Path, *, below: int | None = None) -> Path | None:
    """`newest_complete`; None only where no checkpoint was ever finished.

    Raises:
        DamagedCheckpoint: there are checkpoints and none is complete: starting at step 0 would hide
            that.
    """
    newest = newest_complete(folder, below=below)
    if newest is None and any(_fault_of(path) for path in step_entries(folder)):
        raise none_usable(folder, why="; ".join(sorted(_newest(folder, below=None)[1])))
    return newest


def none_usable(folder: Path, *, why: str) -> DamagedCheckpoint:
    """The error for a checkpoints folder in which no checkpoint can be loaded."""
    fix = "restore one of them, load another with --load FOLDER, or start again at step 0 with --no-auto-resume, "
    fix += "which renames them and deletes none"
    return DamagedCheckpoint(f"no checkpoint in {folder} can be used", why=why, fix=fix)


def find_checkpoint(path: Path) -> Path:
    """The step folder of `find_manifest`, with its errors."""
    return find_manifest(path)[0]


def find_manifest(path: Path) -> tuple[Path, Manifest]:
    """The step folder that a path names, and its manifest: that folder; or a run or checkpoints
    folder, for its newest.

    Raises:
        DamagedCheckpoint: that checkpoint is not complete; an older one is never taken in its
            place.
        CheckpointError: no such folder, or no checkpoint in it.
    """
    return (step := named_checkpoint(path)), require_complete(step)


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
    raise CheckpointError(
        f"{path} holds no complete checkpoint", why="no step-NNNNNNNN in it is complete", fix=NAMES
    )


def _fault_of(path: Path) -> CheckpointError | None:
    try:
        require_complete(path)
        return None
    except NewerFormat:
        raise
    except CheckpointError as error:
        return error


def _newest(folder: Path, *, below: int | None) -> tuple[Path | None, list[str]]:
    """The newest sound checkpoint, else the newest complete one; and what is newer and not sound,
    with the reasons.
    """
    newest, reasons = None, dict[Path, str]()
    for path in reversed(
        [path for path in step_entries(folder) if below is None or step_of(path) < below]
    ):
        fault = _fault_of(path)
        names = not_finite(path) if fault is None else []
        if fault is None and (newest is None or not names):
            newest = path
        if fault is None and not names:
            break
        reasons[path] = describe_not_finite(names) if fault is None else fault.why or fault.what
    first = -1 if newest is None else step_of(newest)
    skipped = [
        f"{path.name} ({why})"
        for path, why in reasons.items()
        if path != newest and step_of(path) >= first
    ]
    unfinished = [path for path, ending in _entries(folder) if ending == "tmp" and below is None]
    newer = [path for path in unfinished if step_of(path) > first]
    return newest, skipped + [f"{path.name} (it was never finished)" for path in newer]


def step_entries(folder: Path) -> list[Path]:
    """Everything with the name of a step, oldest first; files and links too, which are then found
    damaged or not.
    """
    return sorted(
        (path for path, ending in _entries(folder) if ending in ("", "replaced")), key=step_of
    )


def leftovers(folder: Path) -> list[Path]:
    """What killed writers and deleters have left."""
    return sorted(path for path, ending in _entries(folder) if ending in LEFTOVER)


def step_of(path: Path) -> int:
    """The step of a folder by its name."""
    return int(path.stem.removeprefix("step-"))


def _entries(folder: Path) -> list[tuple[Path, str]]:
    """Every entry with the name of a step, and the ending behind it: "", "tmp", "deleted",
    "replaced", "superseded".

    What was set aside by a `commit` that was completed ends in "was replaced"; after a kill between
    its renames it counts under its step.
    """
    paths = (
        [path for path in folder.iterdir() if _ending(path) is not None] if folder.is_dir() else []
    )
    names = {path.name for path in paths}
    return [
        (path, "was replaced" if ending == "replaced" and path.stem in names else ending)
        for path in paths
        if (ending := _ending(path)) is not None
    ]


def _ending(path: Path) -> str | None:
    name = _NAME.fullmatch(path.name)
    return None if name is None else (name[2] or "").partition("-")[0]
