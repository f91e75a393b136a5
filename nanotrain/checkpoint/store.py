"""The checkpoints folder of a run: which checkpoints are complete.

checkpoints/
  step-00000100/               complete: final name, readable manifest, every file in full size
    manifest.json
    shard-00000-of-00004.safetensors
  step-00000200.tmp/           being written, or left by a killed writer; removed at the next save
  step-00000050.deleted/       being deleted; removed at the next save
  step-00000150.replaced/      the older of two saves; counts as step-00000150 while that is missing
  step-00000300.superseded-1/  set aside by a run that resumed from an earlier step: never chosen,
                               never deleted

read_manifest, require_complete          one checkpoint
saved_config, not_finite, file_sizes     configuration, unsound tensors and files in a manifest,
                                         from its first lines
complete_checkpoints, last_complete,     a folder of checkpoints; "latest" is always derived, never
newest_complete, checkpoint_to_resume,   stored
find_checkpoint, find_manifest
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
from nanotrain.checkpoint.stored import MANIFEST, Stored, stored_at
from nanotrain.errors import CheckpointError
from nanotrain.log import get_logger
from nanotrain.quantities import count_of, step_name
from nanotrain.untrusted import object_of, parse_json, read_file, unreadable

NAMES = "name a run folder, its checkpoints folder, or one step-NNNNNNNN of it"
_NAME = re.compile(r"step-(?P<step>\d{8,})(?:\.(?P<ending>.*))?")  # name of a folder
# files of a folder of Megatron-LM, and of a step in it
MEGATRON_FILES = ("latest_checkpointed_iteration.txt", "common.pt")
DCP_FILES = (".metadata", "step-*/.metadata")  # patterns
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
    name = _NAME.fullmatch(path.name)
    if name and int(name["step"]) != manifest.step:
        why = f"step is {manifest.step}, the folder is named {path.name}"
        raise damaged(f"{file} belongs to another folder", why=why, path=path)
    return manifest


def saved_config(path: Path) -> Mapping[str, Any] | None:
    """The configuration in a step folder; None if only the whole manifest can show it.

    A rank needs it before its process groups exist. The records of the chunks come last: on 1,024
    ranks they are 36 to 60 MB, which take 2 s of CPU time and 0.6 GB of memory to read and check;
    the first lines take 0.5 ms (measured). The checksum covers all of the manifest, so these lines
    are unverified; the first rank verifies them when the checkpoint is loaded.
    """
    config = _first_lines(path).get("config")
    return config if isinstance(config, dict) else None


def saved_stages(path: Path) -> list[str]:
    """The stages of the data in a step folder, after `nanotrain data mix`; empty without them."""
    stages = saved_objects(path).get("stages")
    return [str(stage) for stage in stages] if isinstance(stages, list) else []


def saved_objects(path: Path) -> Mapping[str, Any]:
    """The counters and records in a step folder, read as by `saved_config`; empty if unknown."""
    objects = _first_lines(path).get("objects")
    return objects if isinstance(objects, dict) else {}


def not_finite(path: Path) -> list[str]:
    """The tensors of a complete checkpoint with values that are not finite; empty if unknown."""
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
    """The fields of a manifest before the records of its chunks.

    Empty if they cannot be read or are of another version.
    """
    try:
        text = read_file(path / MANIFEST, follows_links=False, until=_RECORDS)
        head = _RECORDS.split(text, maxsplit=1)
        body = object_of(parse_json(head[0] + b"}", allow_nan=True), "it")
    except (OSError, ValueError):
        return {}
    is_known = len(head) == 2 and (body.get("format"), body.get("version")) == (FORMAT, VERSION)
    return body if is_known else {}


def require_complete(path: Path) -> Manifest:
    """Check that a checkpoint is complete, by file sizes without checksums; its manifest.

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
    """Check that every file of a checkpoint is there in full size.

    Args:
        path: step folder.
        files: sizes in bytes by name.

    Raises:
        CheckpointError: one is missing or damaged.
    """
    stored = stored_at(path)
    for name, size in files.items():
        why = _file_fault(path / name, size, stored=stored)
        if why:
            raise damaged(f"{path} is incomplete", why=why, path=path)


def _file_fault(file: Path, size: int, *, stored: Stored | None) -> str:
    """Why a file of a checkpoint cannot be used; "" if it is there or in object storage."""
    try:
        status = os.lstat(file)
    except OSError as error:
        if error.errno != errno.ENOENT:
            return f"{file.name}: {error.strerror}"
        if stored is None or file.name not in stored.sizes:
            return f"{file.name} is missing"
        present = stored.sizes[file.name]
        fault = f"{file.name} has {present} of {size} bytes in {stored.remote}"
        return fault if present != size else ""
    if not stat.S_ISREG(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "no regular file"
        return f"{file.name} is {kind}"
    fault = f"{file.name} has {status.st_size} of {size} bytes"
    return fault if status.st_size != size else ""


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a checkpoints folder, oldest first; skips others silently."""
    return [path for path in step_entries(folder) if _fault_of(path) is None]


def last_complete(folder: Path, number: int) -> list[Path]:
    """The last complete checkpoints, at most `number`, oldest first; reads no older manifest."""
    found: list[Path] = []
    for path in reversed(step_entries(folder)):
        if len(found) < number and _fault_of(path) is None:
            found.insert(0, path)
    return found


def newest_complete(folder: Path, *, below: int | None = None) -> Path | None:
    """The sound checkpoint of the highest step, or None; a warning lists newer unusable ones.

    A sound checkpoint is complete and all its values are finite; without one the newest complete
    checkpoint is taken.

    Args:
        folder: checkpoints folder of a run.
        below: exclusive bound of the considered steps; None for no bound.

    Raises:
        NewerFormat: the newest is of a later format; resuming from an older one would discard its
            steps.
    """
    newest, skipped = _newest_usable(folder, below=below)
    if skipped:
        chosen = f"using {newest.name}" if newest else "no complete one is left"
        log.warning(
            "skipped unusable checkpoints in %s: %s; %s", folder, ", ".join(sorted(skipped)), chosen
        )
    return newest


def checkpoint_to_resume(folder: Path, *, below: int | None = None) -> Path | None:
    """The newest complete checkpoint, to resume from; None if no save was ever finished.

    Raises:
        DamagedCheckpoint: there are checkpoints and none is complete: starting at step 0 would hide
            that.
    """
    newest = newest_complete(folder, below=below)
    if newest is None and any(_fault_of(path) for path in step_entries(folder)):
        _, skipped = _newest_usable(folder, below=None)
        raise none_usable(folder, why="; ".join(sorted(skipped)))
    return newest


def none_usable(folder: Path, *, why: str) -> DamagedCheckpoint:
    """The error for a checkpoints folder in which no checkpoint can be loaded."""
    return DamagedCheckpoint(
        f"no checkpoint in {folder} can be used",
        why=why,
        fix="restore one of them, load another with --load FOLDER, or start again at step 0 "
        "with --no-auto-resume, which renames them and deletes none",
    )


def find_checkpoint(path: Path) -> Path:
    """The step folder of `find_manifest`, with its errors."""
    return find_manifest(path)[0]


def find_manifest(path: Path) -> tuple[Path, Manifest]:
    """The step folder that a path names, and its manifest.

    Args:
        path: step folder; or run or checkpoints folder, for its newest checkpoint.

    Raises:
        DamagedCheckpoint: that checkpoint is not complete; an older one is never taken in its
            place.
        CheckpointError: no such folder, or no checkpoint in it.
    """
    step = named_checkpoint(path)
    return step, require_complete(step)


def named_checkpoint(path: Path) -> Path:
    """The step folder of `find_manifest`, whatever is in it; raises only where there is none."""
    if not path.is_dir():
        why = "it is a file" if path.is_file() else "there is no such folder"
        raise CheckpointError(f"{path} is not a checkpoint", why=why, fix=NAMES)
    if (path / MANIFEST).exists():
        return path
    if path.name.startswith("step-"):
        refuse_dcp(path)
        return path
    for folder in (path / "checkpoints", path):
        if entries := step_entries(folder):
            return entries[-1]
    if (path / "config.json").is_file():
        raise CheckpointError(
            f"{path} is a Hugging Face folder",
            why="it has a config.json and no manifest",
            fix=f"--pretrained-checkpoint {path} starts a run from its weights",
        )
    if has_megatron_files(path):
        raise CheckpointError(
            f"{path} is a checkpoint of Megatron-LM",
            why="it has no manifest",
            fix=f"nanotrain checkpoint import-megatron {path} FOLDER, then --load FOLDER",
        )
    refuse_dcp(path)
    raise CheckpointError(
        f"{path} holds no complete checkpoint", why="no step-NNNNNNNN in it is complete", fix=NAMES
    )


def is_megatron(path: Path) -> bool:
    """Whether a path is a folder of Megatron-LM, without a checkpoint of ours."""
    if not path.is_dir() or path.name.startswith("step-") or (path / MANIFEST).exists():
        return False
    if step_entries(path / "checkpoints") or step_entries(path):
        return False
    return has_megatron_files(path)


def has_megatron_files(path: Path) -> bool:
    """Whether a folder has the files of a checkpoint of Megatron-LM."""
    return any((path / name).is_file() for name in MEGATRON_FILES) or any(path.glob("mp_rank_*"))


def refuse_dcp(path: Path) -> None:
    """Check that a folder without manifest is none of torch.distributed.checkpoint.

    Raises:
        CheckpointError: it is; the error names the command that imports it.
    """
    if any(next(path.glob(pattern), None) for pattern in DCP_FILES):
        raise CheckpointError(
            f"{path} is a checkpoint of torch.distributed.checkpoint",
            why="it has no manifest",
            fix=f"nanotrain checkpoint import-dcp {path} FOLDER, then --load FOLDER",
        )


def _fault_of(path: Path) -> CheckpointError | None:
    """Why a step folder is incomplete or damaged; None if it is sound."""
    try:
        require_complete(path)
        return None
    except NewerFormat:
        raise
    except CheckpointError as error:
        return error


def _newest_usable(folder: Path, *, below: int | None) -> tuple[Path | None, list[str]]:
    """The newest sound checkpoint, else the newest complete one; texts on newer unusable ones."""
    considered = [path for path in step_entries(folder) if below is None or step_of(path) < below]
    newest, reasons = _newest_sound(considered)
    first = -1 if newest is None else step_of(newest)
    skipped = []
    for path, why in reasons.items():
        if path != newest and step_of(path) >= first:
            skipped.append(f"{path.name} ({why})")
    if below is None:
        skipped += [f"{path.name} (it was never finished)" for path in _unfinished(folder, first)]
    return newest, skipped


def _newest_sound(paths: Sequence[Path]) -> tuple[Path | None, dict[Path, str]]:
    """The newest sound checkpoint, else the newest complete one.

    Args:
        paths: step folders, oldest first.

    Returns:
        The checkpoint, or None; and why other checkpoints are damaged or unsound.
    """
    newest = None
    reasons: dict[Path, str] = {}
    for path in reversed(paths):
        fault = _fault_of(path)
        if fault is not None:
            reasons[path] = fault.why or fault.what
            continue
        names = not_finite(path)
        if not names:
            return path, reasons
        if newest is None:
            newest = path
        reasons[path] = describe_not_finite(names)
    return newest, reasons


def _unfinished(folder: Path, above: int) -> list[Path]:
    """Temporary folders of saves at steps above a step."""
    return [path for path, ending in _entries(folder) if ending == "tmp" and step_of(path) > above]


def step_entries(folder: Path) -> list[Path]:
    """Everything with the name of a step, oldest first; files and links too, damaged or not."""
    paths = [path for path, ending in _entries(folder) if ending in ("", "replaced")]
    return sorted(paths, key=step_of)


def leftovers(folder: Path) -> list[Path]:
    """Folders that killed writers and deleters have left."""
    return sorted(path for path, ending in _entries(folder) if ending in LEFTOVER)


def step_of(path: Path) -> int:
    """The step of a folder by its name."""
    return int(path.stem.removeprefix("step-"))


def _entries(folder: Path) -> list[tuple[Path, str]]:
    """Entries with the name of a step and their endings.

    Endings are "", "tmp", "deleted", "replaced", "superseded". A folder that a completed `commit`
    set aside ends in "was replaced"; after a kill between its renames it counts under its step.
    """
    if not folder.is_dir():
        return []
    endings = {}
    for path in folder.iterdir():
        ending = _ending(path)
        if ending is not None:
            endings[path] = ending
    names = {path.name for path in endings}
    for path, ending in endings.items():
        if ending == "replaced" and path.stem in names:
            endings[path] = "was replaced"
    return list(endings.items())


def _ending(path: Path) -> str | None:
    """The ending of a step folder's name: "" for step-00000010, "tmp" for step-00000010.tmp-1.

    None for other names.
    """
    name = _NAME.fullmatch(path.name)
    if name is None:
        return None
    ending, _, _ = (name["ending"] or "").partition("-")
    return ending
