"""Addresses in object storage as arguments of commands.

    read_path, read_name    download the small files of an address into a local folder
    written_path            a local path, to be uploaded
    is_fetched              whether a path is in a folder that `read_path` made
    show, with_addresses    print, or edit, a text that has to name addresses, not local paths
    transfers               around a command: upload after success, then remove the local files

Shards of checkpoints are not downloaded: they are read in object storage, chunk by chunk.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nanotrain.errors import ConfigError
from nanotrain.paths import expanded, local_path, require_utf8
from nanotrain.runs.files import disk_errors
from nanotrain.storage.remote import MissingObject, Remote, is_address, parse

_FIX = "set TMPDIR to another folder"


def read_path(text: str) -> Path:
    """Parse a path. For an address, download its small files and return the local folder.

    Raises:
        CheckpointError: there is nothing at the address.
        StorageFault: it cannot be reached.
    """
    if not is_address(text):
        return local_path(text)
    from nanotrain.checkpoint.stored import fetched

    remote = parse(text)
    return fetched(remote, local_folder("read") / remote.scheme)


def read_name(text: str) -> str:
    """A name on the hub, or a path as from `read_path`."""
    return str(read_path(text)) if is_address(text) else expanded(text)


def written_path(text: str, *, suffix: str = "") -> Path:
    """Parse a path. For an address, return a local path that `transfers` uploads.

    Args:
        text: path or address.
        suffix: ending of the file that a prefix stands for.

    Raises:
        ConfigError: there is something at the address, or the path is not UTF-8.
        StorageFault: it cannot be reached.
    """
    if not is_address(text):
        return local_path(require_utf8(text, "the path to write"))
    remote = parse(text)
    if has_objects(remote, suffix=suffix):
        raise ConfigError(
            f"{remote} is not empty",
            why="its objects would be replaced",
            fix="name another place",
        )
    path = local_folder("written") / remote.scheme / remote.path
    with disk_errors(path, fix=_FIX):
        path.parent.mkdir(parents=True, exist_ok=True)
    return path


def has_objects(remote: Remote, *, suffix: str) -> bool:
    """Whether there is a file, or for an empty suffix a folder, at an address."""
    try:
        if suffix:
            return bool(Remote(remote.scheme, remote.path + suffix).read(0, 1))
        return bool(remote.sizes())
    except MissingObject:
        return False


def show(text: str) -> None:
    """Print a text that may name local folders of addresses."""
    print(with_addresses(text), flush=True)


def with_addresses(text: str) -> str:
    """A text for the user, which names addresses and not their local folders."""
    try:
        folder = local_folder("", makes=False)
    except OSError:  # there is no folder for temporary files, so no text has a path in it
        return text
    base = re.escape(str(folder))
    return re.sub(rf"{base}/(?:read|written)/(\w+)/", r"\1://", text)


@contextmanager
def transfers() -> Iterator[None]:
    """Upload what the block has written, in that order; a block that fails uploads nothing."""
    try:
        yield
        written = local_folder("written", makes=False)
        files = [path for path in written.rglob("*") if path.is_file()]
        for file in sorted(files, key=lambda path: path.stat().st_mtime_ns):
            scheme, *names = file.relative_to(written).parts
            remote = Remote(scheme, "/".join(names))
            remote.put(file)
            print(f"uploaded {remote}", flush=True)
    finally:
        shutil.rmtree(local_folder("", makes=False), ignore_errors=True)


def local_folder(name: str, *, makes: bool = True) -> Path:
    """A folder of this process for temporary files."""
    base = Path(tempfile.gettempdir()) / f"nanotrain-{os.getuid()}-{os.getpid()}"
    if makes:
        with disk_errors(base, fix=_FIX):
            base.mkdir(mode=0o700, exist_ok=True)
            if base.stat().st_uid != os.getuid():
                raise PermissionError(1, "it belongs to another user")
            (base / name).mkdir(exist_ok=True)
    return base / name


def is_fetched(path: Path) -> bool:
    """Whether a path is in a folder that `read_path` made, which is removed at the end."""
    return path.is_relative_to(local_folder("read", makes=False))
