"""Runs in object storage and their local folders.

A local folder has the small files and an index of the checkpoints, without their shards.

    s3://bucket/run/checkpoints/
        step-00000100/             committed by its manifest.json, which is written last
        step-00000100.2/           the same step saved again: the highest number counts
        step-00000050/superseded   set aside: the run went back to an earlier step
    FOLDER/checkpoints/step-00000100/
        manifest.json              the same manifest
        object-storage.json        address and sizes of the shards that are not in the folder

    stored_at, mark       the shards of a local step folder that are in object storage
    steps_of, Generation  the checkpoints of a listing
    mirror                make or renew the local folder of an address, from one listing

An object store cannot rename: a commit, and setting a step aside, are one object each.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from nanotrain.checkpoint.run_files import keep_newer
from nanotrain.errors import CheckpointError, ConfigError
from nanotrain.log import get_logger
from nanotrain.runs.files import disk_errors, write_text
from nanotrain.storage.remote import Remote, Stat, is_address, parse
from nanotrain.untrusted import MAX_FILE_BYTES, object_of, parse_json, read_file, whole_number

MANIFEST = "manifest.json"
MARKER = "object-storage.json"
SUPERSEDED = "superseded"
MAX_FILES = 10_000  # most files of a run outside of its checkpoints, and most checkpoints
# folder, step, generation, name of an object
_STEP = re.compile(r"(.*?)(step-\d{8,})(?:\.([1-9]\d{0,8}))?/([^/]+)")
_STEP_NAME = re.compile(r"(?:^|/)step-(\d{8,})$")
_INSIDE = re.compile(r"(checkpoints/)?step-\d{8,}")  # no run, whose name is the user's
_SAVE = re.compile(r"(step-\d{8,})\.[^/]*$")
_SHARD = re.compile(r"(.*/)?shard-\d{5,}-of-\d{5,}\.safetensors")
# an object's name could be a path outside of the folder
_UNSAFE = re.compile(r"(^|/)(\.{0,2})(/|$)|[\x00-\x1f\\]")


log = get_logger(__name__)


class Stored(NamedTuple):
    """The folder of a checkpoint in object storage, and the sizes of its shards by name."""

    remote: Remote
    sizes: Mapping[str, int]

    def delete(self) -> None:
        """Delete the checkpoint, its manifest first: after a kill the rest is no checkpoint."""
        self.remote.delete([MANIFEST])
        self.remote.delete([*self.sizes, SUPERSEDED])


def stored_at(path: Path) -> Stored | None:
    """The shards of a step folder in object storage; None without a readable record.

    The folder ends with bucket and name of the address, as the user has named it. Another record
    came with files of a stranger, who could have this machine read and delete objects of the user:
    one warning, and it counts as none.
    """
    try:
        body = object_of(parse_json(read_file(path / MARKER, follows_links=False)), MARKER)
        sizes = object_of(body.get("sizes"), "sizes")
        address = str(body.get("address"))
        remote = parse(address) if is_address(address) else None
        if remote is None or any("/" in name for name in sizes) or not _is_of(remote, path):
            return None
        return Stored(remote, {name: whole_number(sizes[name], name) for name in sizes})
    except (OSError, ValueError, ConfigError):
        return None


@cache
def _is_of(remote: Remote, path: Path) -> bool:
    """Whether a folder is the local folder of an address.

    `step-00000004.2` and folders that are being deleted count as the folder of the step.
    """
    real = _SAVE.sub(r"\1", os.path.realpath(path))
    name = _SAVE.sub(r"\1", remote.path)
    if not real.endswith(f"/{name}") or _INSIDE.fullmatch(name):
        log.warning(
            "%s names %s, which is not the address of this folder: it is not read",
            path / MARKER,
            remote,
        )
        return False
    return True


def mark(path: Path, stored: Stored) -> None:
    """Record the address of the shards of a step folder, which is made if it is missing."""
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    record = {"address": str(stored.remote), "sizes": dict(stored.sizes)}
    write_text(path / MARKER, json.dumps(record))


class Generation(NamedTuple):
    """One save of a step in object storage."""

    folder: str  # below the listed one
    number: int  # 1 for step-00000100, 2 for step-00000100.2
    objects: dict[str, Stat]

    @property
    def is_committed(self) -> bool:
        """Whether the listed folder is a complete checkpoint, set aside or not."""
        return MANIFEST in self.objects

    @property
    def is_superseded(self) -> bool:
        """Whether a run went back to an earlier step."""
        return SUPERSEDED in self.objects


def steps_of(found: Mapping[str, Stat]) -> dict[str, list[Generation]]:
    """The saves in a listing by the local name of their folder, oldest first.

    >>> names = ["step-00000004.2/manifest.json", "step-00000004/manifest.json"]
    >>> found = dict.fromkeys(names, Stat(1, 0.0))
    >>> [save.folder for save in steps_of(found)["step-00000004"]]
    ['step-00000004', 'step-00000004.2']
    """
    by_folder: dict[str, Generation] = {}
    saves: dict[str, list[Generation]] = {}
    for name, stat in found.items():
        match = _STEP.fullmatch(name)
        if match is None:
            continue
        parent, step, number, object_name = match.groups()
        folder = name.rpartition("/")[0]
        if folder not in by_folder:
            by_folder[folder] = Generation(folder, int(number or 1), {})
            saves.setdefault(parent + step, []).append(by_folder[folder])
        by_folder[folder].objects[object_name] = stat
    for generations in saves.values():
        generations.sort(key=lambda save: save.number)
    return saves


def mirror(remote: Remote, folder: Path) -> None:
    """Bring the small files below an address into a local folder, and an index of its checkpoints.

    Of two versions of a file the newer one stays (`keep_newer`). Checkpoints that were deleted or
    set aside in object storage go, unless the folder has all shards of a deleted one.

    Raises:
        StorageFault: it cannot be reached.
    """
    objects = {name: stat for name, stat in remote.sizes().items() if not _UNSAFE.search(name)}
    saves = steps_of(objects)
    current = _current_saves(saves)
    is_ahead = _is_ahead(folder, current)
    small = _small_files(objects)
    _require_few(small, num_steps=len(current), remote=remote)
    keep_newer(small, remote, folder=folder, is_ahead=is_ahead)
    for step in [*folder.glob("step-*[0-9]"), *folder.glob("checkpoints/step-*[0-9]")]:
        local = str(step.relative_to(folder))
        if "." not in step.name and local not in current:
            _drop_step(step, is_deleted=local not in saves)
    for local, save in current.items():
        _mirror_step(folder / local, remote / save.folder, objects=save.objects)
    if MANIFEST in objects:  # the folder of one checkpoint
        mark(folder, Stored(remote, _shards(objects)))


def _current_saves(saves: Mapping[str, list[Generation]]) -> dict[str, Generation]:
    """The last committed save of a step that is not set aside, by the local name of its folder."""
    current = {}
    for local, generations in saves.items():
        for save in generations:
            if save.is_committed and not save.is_superseded:
                current[local] = save
    return current


def _require_few(files: Mapping[str, Stat], *, num_steps: int, remote: Remote) -> None:
    """Check the files that would be downloaded from an address, which may be somebody else's.

    Raises:
        CheckpointError: they are too many, or one is too large.
    """
    why = ""
    if len(files) > MAX_FILES or num_steps > MAX_FILES:
        why = f"it has {len(files):,} small files and {num_steps:,} checkpoints"
        why += f", at most {MAX_FILES:,} are read"
    for name, stat in files.items():
        if stat.size > MAX_FILE_BYTES and not name.endswith(".safetensors"):
            why = f"{name} has {stat.size:,} bytes, at most {MAX_FILE_BYTES:,} are read"
    if why:
        raise CheckpointError(
            f"{remote} cannot be read as a run or model", why=why, fix="name a folder in it"
        )


def _small_files(found: Mapping[str, Stat]) -> dict[str, Stat]:
    """Files of a run outside of its checkpoints."""
    return {
        name: stat
        for name, stat in found.items()
        if not _STEP.fullmatch(name) and not _SHARD.fullmatch(name)
    }


def _is_ahead(folder: Path, current: Iterable[str]) -> bool:
    """Whether a local folder has a checkpoint of a later step than every step of a listing."""
    local = [str(path.parent) for path in folder.glob(f"checkpoints/step-*/{MANIFEST}")]
    return _newest_step(local) > _newest_step(current)


def _newest_step(folders: Iterable[str]) -> int:
    """The latest step of step folders that were not set aside; -1 without one."""
    names = (_STEP_NAME.search(folder) for folder in folders)
    return max((int(name[1]) for name in names if name), default=-1)


def _drop_step(step: Path, *, is_deleted: bool) -> None:
    """Remove a local step that was deleted or set aside in object storage."""
    stored = stored_at(step)
    if stored is None:
        return
    if is_deleted and all((step / name).exists() for name in stored.sizes):
        (step / MARKER).unlink()  # deleted there by another hand: this copy may be the last one
    else:
        shutil.rmtree(step, ignore_errors=True)


def _mirror_step(step: Path, remote: Remote, *, objects: Mapping[str, Stat]) -> None:
    """Write the manifest of a stored step to the local disk, with a mark that names the store."""
    stored = Stored(remote, _shards(objects))
    manifest = step / MANIFEST
    if stored_at(step) == stored and manifest.is_file():
        return
    text = (remote / MANIFEST).read(0, objects[MANIFEST].size)
    with disk_errors(step):
        if not manifest.is_file() or manifest.read_bytes() != text:
            shutil.rmtree(step, ignore_errors=True)
            step.mkdir(parents=True)
            write_text(manifest, text.decode(errors="replace"))
    mark(step, stored)


def _shards(objects: Mapping[str, Stat]) -> dict[str, int]:
    """Sizes of the shards in a listing, by name."""
    return {name: stat.size for name, stat in objects.items() if _SHARD.fullmatch(name)}


def fetched(remote: Remote, base: Path) -> Path:
    """The local folder of an address that is read, with its small files.

    Args:
        remote: address of a run, a step of it, or a folder of a model or a tokenizer.
        base: the folder in which the local one is, below bucket and name.

    Raises:
        CheckpointError: there is nothing at the address.
        StorageFault: it cannot be reached.
    """
    names = remote.path.split("/")
    run = remote
    while len(names) > 1 and re.fullmatch(r"step-\d{8,}(\.\d+)?|checkpoints", names[-1]):
        names.pop()
        run = run.parent
    mirror(run, base / run.path)
    path = base / remote.path
    if not path.is_dir() or not any(path.iterdir()):
        raise CheckpointError(
            f"{remote} is not there",
            why="there is no folder of this name, or the checkpoint was not finished",
            fix="list the bucket, and name a folder of it",
        )
    return path


def require_writable(remote: Remote) -> None:
    """Check that objects can be written: write and delete a small one.

    Raises:
        StorageFault: it cannot be written or deleted.
    """
    (remote / ".writable").write(b"this process can write here")
    remote.delete([".writable"])
