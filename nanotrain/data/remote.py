"""The files of a corpus: local ones, and those of object storage, read through a cache on the
host's disk.

    LocalFile     a file, by `pread`
    RemoteFile    an object, by ranged requests of 256 KiB, as much as a checksum covers
    ChunkCache    FOLDER/objects/<object>/12      one such chunk
                  FOLDER/objects/<object>/whole   an index or checksums: all of an object
                  FOLDER/locks/, FOLDER/used      whoever fetches a chunk holds its lock; the bytes of all chunks

All processes of a host share the folder, so a chunk is requested once per host, however many ranks
need it. A file in it is complete, as it gets its name when it has been written: a killed process
leaves a temporary file at most. The chunks that were not used for longest go first. An object that
replaces another of its name has chunks of its own.
"""

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import EPERM
from fcntl import LOCK_EX, flock
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Self

from nanotrain.config.config import DataConfig
from nanotrain.data.token_format import BLOCK_BYTES
from nanotrain.errors import EnvironmentFault, StorageFault
from nanotrain.paths import Address
from nanotrain.runs.files import disk_errors
from nanotrain.storage.remote import MissingObject, parse

_NUM_LOCKS = 1024
_KEPT = 0.9  # share of the bytes that stay when chunks are removed
_STALE_S = 3600.0  # age of a temporary file that nobody writes any more
_REQUESTS, _REQUEST_BYTES = 8, 16 << 20  # for a whole object: at a time, and bytes of each
_CURE = "choose another --object-storage-cache-path, or lower --object-storage-cache-gib"


class LocalFile:
    """A file of this machine."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, path.stat().st_size

    @property
    def local(self) -> Path:
        """A local file with the same content."""
        return self.path

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop); fewer where the file ends."""
        data = b""
        while len(data) < stop - start:
            more = os.pread(self._descriptor, stop - start - len(data), start + len(data))
            if not more:
                break
            data += more
        return data

    def drop(self, start: int) -> bool:
        """Whether a byte that is damaged can be read again from elsewhere."""
        return False

    @cached_property
    def _descriptor(self) -> int:
        return os.open(self.path, os.O_RDONLY)

    def __del__(self) -> None:
        if "_descriptor" in self.__dict__:
            os.close(self._descriptor)


@dataclass(frozen=True)
class ChunkCache:
    """A folder with chunks of objects; threads and processes share it."""

    folder: Path
    max_bytes: int  # of the chunks; whole objects come on top

    @classmethod
    def of(cls, data: DataConfig) -> Self:
        """The cache of a data section; by default in the folder for temporary files, which is on a
        disk of the host.
        """
        default = Path(tempfile.gettempdir()) / f"nanotrain-objects-{os.getuid()}"
        folder = Path(data.object_storage_cache_path or default)
        return cls(folder, int(data.object_storage_cache_gib * 2**30))

    def make(self) -> None:
        """Create the folder; that of another user is refused, who could put other tokens into it."""
        with disk_errors(self.folder, fix=_CURE):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.folder.stat().st_uid != os.getuid():
                raise PermissionError(EPERM, "it belongs to another user")

    @contextmanager
    def locked(self, path: Path) -> Iterator[None]:
        """Hold the lock of a file of the cache; files may share one."""
        number = int.from_bytes(blake2b(str(path).encode(), digest_size=4).digest()) % _NUM_LOCKS
        lock = self.folder / "locks" / str(number)
        with disk_errors(lock, fix=_CURE):
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = lock.open("ab")
            flock(file, LOCK_EX)
        with file:
            yield

    def add(self, path: Path, data: bytes) -> None:
        """Count a chunk, remove old ones if they are too many, and write it: a killed process has
        counted too much.
        """
        with open(
            os.open(self.folder / "used", os.O_RDWR | os.O_CREAT), "r+b", buffering=0
        ) as counter:
            flock(counter, LOCK_EX)
            text = counter.read()
            used = len(data) + (int(text) if text else self.max_bytes)
            used = len(data) + self._remove_oldest() if used > self.max_bytes else used
            os.pwrite(counter.fileno(), b"%020d" % used, 0)
        with _renamed(path) as partial:
            partial.write_bytes(data)

    def _remove_oldest(self) -> int:
        """Remove chunks until some space is free, and what killed processes left; returns the bytes
        of the others.
        """
        chunks, most = [], _KEPT * self.max_bytes
        for entry in (
            entry for folder in os.scandir(self.folder / "objects") for entry in os.scandir(folder)
        ):
            with suppress(FileNotFoundError):
                status = entry.stat()
                if entry.name.isdigit():
                    chunks.append((status.st_mtime_ns, status.st_size, entry.path))
                elif entry.name != "whole" and status.st_mtime < time.time() - _STALE_S:
                    os.unlink(entry.path)
        total = sum(size for _, size, _ in chunks)
        for _, size, path in sorted(chunks):
            if total <= most:
                break
            Path(path).unlink(missing_ok=True)
            total -= size
        return total


class RemoteFile:
    """An object.

    Args:
        path: its address.
        cache: where its chunks are kept.

    Raises:
        FileNotFoundError: there is none.
    """

    def __init__(self, path: Address, cache: ChunkCache) -> None:
        self.path, self.cache, self._dropped = path, cache, set[int]()
        cache.make()
        self._remote = parse(str(path))
        with _storage_errors():
            info = self._remote.info()
        self.size, version = (
            int(info["size"]),
            sorted((key, str(value)) for key, value in info.items()),
        )
        self.folder = (
            cache.folder
            / "objects"
            / blake2b(f"{path} {version}".encode(), digest_size=12).hexdigest()
        )

    @cached_property
    def local(self) -> Path:
        """A local file with the same content, fetched once per host."""
        path, starts = self.folder / "whole", range(0, self.size, _REQUEST_BYTES)
        with self.cache.locked(path), disk_errors(path, needed=self.size, fix=_CURE):
            if not path.is_file():
                with (
                    ThreadPoolExecutor(_REQUESTS) as pool,
                    _renamed(path) as partial,
                    partial.open("wb") as file,
                ):
                    for data in pool.map(
                        lambda start: self.fetch(start, start + _REQUEST_BYTES), starts
                    ):
                        file.write(data)
        return path

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop); fewer where the object ends."""
        stop = min(stop, self.size)
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        data = b"".join(map(self._chunk, range(first, last)))
        return data[start - first * BLOCK_BYTES : stop - first * BLOCK_BYTES]

    def drop(self, start: int) -> bool:
        """Remove the chunk with a byte that is damaged; whether it can be fetched again, which is
        so once.
        """
        number = start // BLOCK_BYTES
        is_first = number not in self._dropped
        self._dropped.add(number)
        (self.folder / str(number)).unlink(missing_ok=True)
        return is_first

    def fetch(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop) from the object storage; fewer where the object ends.

        Raises:
            EnvironmentFault: several requests have failed.
        """
        with _storage_errors():
            return self._remote.read(start, min(stop, self.size))

    def _chunk(self, number: int) -> bytes:
        path, start = self.folder / str(number), number * BLOCK_BYTES
        size = min(BLOCK_BYTES, self.size - start)
        with disk_errors(path, needed=size, fix=_CURE):
            if (data := _content(path, size)) is not None:
                return data
            with self.cache.locked(path):
                # no other process has fetched it meanwhile
                if (data := _content(path, size)) is None:
                    data = self.fetch(start, start + size)
                    self.cache.add(path, data)
                return data


CorpusFile = LocalFile | RemoteFile


@contextmanager
def _storage_errors() -> Iterator[None]:
    """Raise what is missing as FileNotFoundError, and other faults with the flag that names the
    place.
    """
    try:
        yield
    except MissingObject as error:
        raise FileNotFoundError(error.what) from None
    except StorageFault as error:
        fix = f"{error.fix}; the place is that of --data-path, and a run that is started again goes on"
        raise EnvironmentFault(error.what, why=error.why, fix=fix) from None


def require_file(path: Path, cache: ChunkCache | None = None) -> CorpusFile:
    """A file of a corpus.

    Args:
        path: its path or address.
        cache: where the chunks of an object are kept; None for the default.

    Raises:
        FileNotFoundError: there is none.
    """
    if not isinstance(path, Address):
        return LocalFile(path)
    return RemoteFile(path, cache or ChunkCache.of(DataConfig()))


def open_file(path: Path, cache: ChunkCache | None = None) -> CorpusFile | None:
    """A file of a corpus; None if there is none. Arguments as of `require_file`."""
    if isinstance(path, Address):
        with suppress(FileNotFoundError):
            return require_file(path, cache)
        return None
    return LocalFile(path) if path.is_file() else None


def local_folder(folder: Path) -> Path:
    """A local folder with the same files: itself, or the copy of a small one in object storage."""
    if not isinstance(folder, Address):
        return folder
    cache = ChunkCache.of(DataConfig())
    with _storage_errors():
        names = [name for name in parse(str(folder)).sizes() if "/" not in name]
    objects = [RemoteFile(folder / name, cache) for name in sorted(names)]
    versions = blake2b(
        "".join(file.folder.name for file in objects).encode(), digest_size=12
    ).hexdigest()
    for file in objects:
        copy = cache.folder / "folders" / versions / file.path.name
        if not copy.exists():
            with disk_errors(copy, fix=_CURE), _renamed(copy) as partial:
                shutil.copyfile(file.local, partial)
    return cache.folder / "folders" / versions


def _content(path: Path, size: int) -> bytes | None:
    """The content of a chunk, which counts as used now; None if it is absent, or incomplete after a
    power failure.
    """
    try:
        os.utime(path)
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return data if len(data) == size else None


@contextmanager
def _renamed(path: Path) -> Iterator[Path]:
    """A temporary file that gets its name when the block ends."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield partial
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
