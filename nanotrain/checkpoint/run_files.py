"""The small files of a run, in its local folder and in object storage: which version stays.

    keep_newer     bring the files of a listing that are newer there into the folder
    FileUploads    the other way: upload the files of the folder that have changed
    FOLDER/.object-storage.json   of every file the version of the object and of the file when both
                                  were the same for the last time

Clocks are never compared: those of the machines and of the store may differ by any time. A side has
changed where its version is not the recorded one. Where both have, contents decide: of two versions
of which one begins with the other the longer one stays, else that of the side with the newest
checkpoint. A local version that goes is kept as `.NAME.replaced`.
"""

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from nanotrain.log import get_logger
from nanotrain.runs.files import disk_errors, write_text
from nanotrain.storage.remote import Remote, Stat
from nanotrain.untrusted import object_of, parse_json, read_file, text_of, whole_number

RECORD = ".object-storage.json"
_READ_BYTES = 1 << 20
_LOCAL_SUFFIXES = (".lock", ".request")  # files of the running job, which stay local
log = get_logger(__name__)


@dataclass(frozen=True)
class Synced:
    """The last version of a file that the local folder and the object storage both had."""

    version: str  # version of the object in storage
    digest: str  # BLAKE2 of the content
    size: int
    # time of the local file with this content, to skip the digest; 0: no local file has it
    mtime_ns: int

    @classmethod
    def of(cls, file: Path, stat: Stat) -> "Synced":
        """A file that was just uploaded or downloaded."""
        status = file.stat()
        return cls(_version(stat), _digest(file), status.st_size, status.st_mtime_ns)

    def is_content_of(self, file: Path) -> bool:
        """Whether a local file has this content."""
        status = file.stat()
        if status.st_size != self.size:
            return False
        return status.st_mtime_ns == self.mtime_ns or _digest(file) == self.digest


def keep_newer(files: Mapping[str, Stat], remote: Remote, *, folder: Path, is_ahead: bool) -> None:
    """Download the files of a listing that are newer in object storage than in a local folder.

    Args:
        files: sizes and versions of the objects, by name.
        remote: the address of the folder.
        folder: the local folder.
        is_ahead: whether the local folder has the newest checkpoint.

    Raises:
        StorageFault: an object or the disk cannot be read or written.
    """
    record = _read_record(folder)
    synced = {}
    for name, stat in files.items():
        entry = record.get(name)
        with disk_errors(folder / name):
            synced[name] = _keep_newer_version(
                remote / name, stat, file=folder / name, entry=entry, is_ahead=is_ahead
            )
    if synced != record:
        _write_record(folder, synced)


def _keep_newer_version(
    remote: Remote, stat: Stat, *, file: Path, entry: Synced | None, is_ahead: bool
) -> Synced:
    """The newer version of one file, which is in the folder then."""
    if not file.exists():
        return _replace(file, _download(remote, stat, file=file), stat=stat)
    if entry is None:
        entry = _as_downloaded(file, stat)
    if entry is not None and entry.version == _version(stat):
        return entry
    partial = _download(remote, stat, file=file)
    is_longer = _begins_with(partial, file)
    if is_longer or (entry is not None and entry.is_content_of(file)):
        return _replace(file, partial, stat=stat)
    if is_ahead or _begins_with(file, partial):
        return _keep_local(file, partial, stat=stat)
    kept = file.with_name(f".{file.name}.replaced")
    os.replace(file, kept)
    log.info("%s is now that of %s, of a later step; the one before is %s", file, remote, kept)
    return _replace(file, partial, stat=stat)


def _download(remote: Remote, stat: Stat, *, file: Path) -> Path:
    """A temporary file with the content and the time of an object."""
    partial = file.with_name(f".{file.name}.partial")
    file.parent.mkdir(parents=True, exist_ok=True)
    partial.unlink(missing_ok=True)
    remote.download(partial, stat.size)
    os.utime(partial, (stat.changed, stat.changed))  # the time that a list of runs shows
    return partial


def _replace(file: Path, partial: Path, *, stat: Stat) -> Synced:
    """Give a downloaded file its name."""
    os.replace(partial, file)
    return Synced.of(file, stat)


def _keep_local(file: Path, partial: Path, *, stat: Stat) -> Synced:
    """Keep the local version; record the object's version, so that the local one is uploaded."""
    there = Synced.of(partial, stat)
    partial.unlink()
    return replace(there, mtime_ns=0)


def _as_downloaded(file: Path, stat: Stat) -> Synced | None:
    """The record of a file that an older version downloaded without a record.

    It has the size and the time of its object; None for any other file.
    """
    status = file.stat()
    if (status.st_size, status.st_mtime) != (stat.size, stat.changed):
        return None
    return Synced.of(file, stat)


def _begins_with(file: Path, start: Path) -> bool:
    """Whether a file begins with the content of another."""
    if file.stat().st_size < start.stat().st_size:
        return False
    with file.open("rb") as longer, start.open("rb") as shorter:
        while expected := shorter.read(_READ_BYTES):
            if longer.read(len(expected)) != expected:
                return False
    return True


def _version(stat: Stat) -> str:
    return stat.version or f"{stat.size} bytes at {stat.changed}"


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "blake2b").hexdigest()[:32]


def _read_record(folder: Path) -> dict[str, Synced]:
    """The record of a folder; empty if there is none that can be read."""
    try:
        rows = object_of(parse_json(read_file(folder / RECORD, follows_links=False)), RECORD)
        return {name: _entry(object_of(row, name)) for name, row in rows.items()}
    except (OSError, ValueError):
        return {}


def _entry(row: Mapping[str, object]) -> Synced:
    return Synced(
        text_of(row.get("version"), "version"),
        text_of(row.get("digest"), "digest"),
        whole_number(row.get("size"), "size"),
        whole_number(row.get("mtime_ns"), "mtime_ns"),
    )


def _write_record(folder: Path, synced: Mapping[str, Synced]) -> None:
    rows = {name: asdict(entry) for name, entry in synced.items()}
    write_text(folder / RECORD, json.dumps(rows, indent=1) + "\n")


class FileUploads:
    """Uploads the files of a run folder and of its tokenizer that have changed.

    Args:
        folder: the run folder.
        remote: its address.
    """

    def __init__(self, folder: Path, remote: Remote) -> None:
        self._folder = folder
        self._remote = remote
        self._synced: dict[str, Synced] | None = None
        self._lock = threading.Lock()

    def upload(self) -> None:
        """Upload the files that differ from what was uploaded or downloaded last.

        Raises:
            StorageFault: a file cannot be written.
        """
        with self._lock:  # the thread of a save, and the training's thread
            self._upload_changed()

    def _upload_changed(self) -> None:
        """Upload each file whose content differs from the last synchronized version."""
        if self._synced is None:
            self._synced = _read_record(self._folder)
        for file in sorted([*self._folder.glob("[!.]*.*"), *self._folder.glob("tokenizer/[!.]*")]):
            if file.is_symlink() or not file.is_file() or file.suffix in _LOCAL_SUFFIXES:
                continue
            name = str(file.relative_to(self._folder))
            entry = self._synced.get(name)
            if entry is not None and entry.is_content_of(file):
                continue
            self._upload(file, name)

    def _upload(self, file: Path, name: str) -> None:
        """Upload one file, and record the version that both sides have now."""
        assert self._synced is not None, "set by upload"
        # taken before the upload, as training goes on appending rows
        here = Synced.of(file, Stat(0, 0.0))
        (self._remote / name).put(file)
        stat = (self._remote / name).stat()
        self._synced[name] = replace(here, version=_version(stat), size=stat.size)
        _write_record(self._folder, self._synced)
