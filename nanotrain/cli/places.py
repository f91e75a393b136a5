"""Addresses where commands take folders: what is read is brought to this machine before, what is
written is uploaded.

    read_path, read_name,     the converters of such arguments; is_fetched tells what the first two made
    written_path
    transfers                 around a command: uploads when it has succeeded, then removes the local files

Shards of checkpoints are not brought: they are read in object storage, chunk by chunk.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nanotrain.errors import ConfigError
from nanotrain.paths import expanded, local_path
from nanotrain.runs.files import disk_errors
from nanotrain.storage.remote import MissingObject, Remote, is_address, parse

_FIX = "set TMPDIR to another folder"


def read_path(text: str) -> Path:
    """The path of a text; of an address, that of the local folder to which its small files are
    brought.

    Raises:
        CheckpointError: there is nothing at the address.
        StorageFault: it cannot be reached.
    """
    if not is_address(text):
        return local_path(text)
    from nanotrain.checkpoint.stored import fetched

    return fetched(parse(text), _base("read"))


def read_name(text: str) -> str:
    """A name as `expanded`, of a hub or a path; of an address, the local path as of `read_path`."""
    return str(read_path(text)) if is_address(text) else expanded(text)


def written_path(text: str, *, suffix: str = "") -> Path:
    """The path of a text; of an address, that of a local file or folder which `transfers` uploads.

    `suffix` is of the file that a prefix stands for.

    Raises:
        ConfigError: there is something at the address.
        StorageFault: it cannot be reached.
    """
    if not is_address(text):
        return local_path(text)
    remote = parse(text)
    with suppress(MissingObject):
        found = Remote(remote.scheme, remote.path + suffix)
        if found.read(0, 1) if suffix else remote.sizes():
            raise ConfigError(
                f"{remote} is not empty",
                why="its objects would be replaced",
                fix="name another place",
            )
    path = _base("written") / remote.scheme / remote.path
    with disk_errors(path, fix=_FIX):
        path.parent.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def transfers() -> Iterator[None]:
    """Upload what the block has written, in the order in which it was; a block that fails uploads
    nothing.
    """
    try:
        yield
        written = _base("written", makes=False)
        files = [path for path in written.rglob("*") if path.is_file()]
        for file in sorted(files, key=lambda path: path.stat().st_mtime_ns):
            scheme, *names = file.relative_to(written).parts
            remote = Remote(scheme, "/".join(names))
            remote.put(file)
            print(f"uploaded {remote}", flush=True)
    finally:
        shutil.rmtree(_base("", makes=False), ignore_errors=True)


def _base(name: str, *, makes: bool = True) -> Path:
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
    """Whether a path is in a folder that `read_path` made, which goes at the end."""
    return path.is_relative_to(_base("read", makes=False))
