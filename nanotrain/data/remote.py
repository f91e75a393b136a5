"""The files of a corpus: local ones, and objects, read through a cache on the host's disk.

    LocalFile     a file, by `pread`
    RemoteFile    an object, by ranged requests of 256 KiB, as much as a checksum covers
    ChunkCache    FOLDER/objects/<object>/12      one such chunk
                  FOLDER/objects/<object>/whole   an index or checksums: all of an object
                  FOLDER/locks/                   whoever fetches a chunk holds its lock
                  FOLDER/used                     the bytes of all chunks

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
from typing import NamedTuple, Self

from nanotrain.config.config import DataConfig
from nanotrain.data.token_format import BLOCK_BYTES
from nanotrain.errors import EnvironmentFault, StorageFault
from nanotrain.paths import Address
from nanotrain.runs.files import disk_errors
from nanotrain.storage.remote import MissingObject, parse
from nanotrain.waiting import named_wait

_NUM_LOCKS = 1024
_KEPT = 0.9  # fraction of the bytes that stay when chunks are removed
_STALE_S = 3600.0  # age of a temporary file that nobody writes any more
_REQUESTS, _REQUEST_BYTES = 8, 16 << 20  # parallel requests for a whole object, and their size
_CURE = "choose another --object-storage-cache-path, or lower --object-storage-cache-gib"


class LocalFile:
    """A file of this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size

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
        """Drop the copy of a damaged byte, for another read; False: a local file has one copy."""
        return False

    @cached_property
    def _descriptor(self) -> int:
        return os.open(self.path, os.O_RDONLY)

    def __del__(self) -> None:
        if "_descriptor" in self.__dict__:
            os.close(self._descriptor)


class _CachedChunk(NamedTuple):
    """A file of the cache; sorted by last use."""

    used_ns: int
    num_bytes: int
    path: str


@dataclass(frozen=True)
class ChunkCache:
    """A folder with chunks of objects; threads and processes share it."""

    folder: Path
    max_bytes: int  # bytes of the chunks; whole objects come on top

    @classmethod
    def of(cls, data: DataConfig) -> Self:
        """The cache of a data section, by default in the host's folder for temporary files."""
        default = Path(tempfile.gettempdir()) / f"nanotrain-objects-{os.getuid()}"
        folder = Path(data.object_storage_cache_path or default)
        return cls(folder, int(data.object_storage_cache_gib * 2**30))

    def make(self) -> None:
        """Create the folder; refuse one of another user, who could put other tokens into it."""
        with disk_errors(self.folder, fix=_CURE):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.folder.stat().st_uid != os.getuid():
                raise PermissionError(EPERM, "it belongs to another user")
            (self.folder / "objects").mkdir(exist_ok=True)

    @contextmanager
    def locked(self, path: Path) -> Iterator[None]:
        """Hold the lock of a file of the cache; files may share one."""
        number = int.from_bytes(blake2b(str(path).encode(), digest_size=4).digest()) % _NUM_LOCKS
        lock = self.folder / "locks" / str(number)
        with disk_errors(lock, fix=_CURE):
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = lock.open("ab")
            with named_wait(f"another process fetches {path}"):
                flock(file, LOCK_EX)
        with file:
            yield

    def add(self, path: Path, data: bytes) -> None:
        """Count a chunk, remove old ones if they are too many, and write it.

        A killed process has counted too much, never too little.
        """
        descriptor = os.open(self.folder / "used", os.O_RDWR | os.O_CREAT)
        with open(descriptor, "r+b", buffering=0) as counter:
            flock(counter, LOCK_EX)
            text = counter.read()
            used = int(text) if text else self.max_bytes
            if used + len(data) > self.max_bytes:
                used = self._remove_oldest()
            os.pwrite(counter.fileno(), b"%020d" % (used + len(data)), 0)
        with _temporary_file(path) as partial:
            partial.write_bytes(data)

    def _remove_oldest(self) -> int:
        """Remove old chunks and leftovers of killed processes; returns the bytes of the rest."""
        chunks = []
        for folder in os.scandir(self.folder / "objects"):
            for entry in os.scandir(folder):
                with suppress(FileNotFoundError):  # removed meanwhile
                    status = entry.stat()
                    if entry.name.isdigit():
                        chunks.append(_CachedChunk(status.st_mtime_ns, status.st_size, entry.path))
                    elif entry.name != "whole" and status.st_mtime < time.time() - _STALE_S:
                        os.unlink(entry.path)
        total = sum(chunk.num_bytes for chunk in chunks)
        for chunk in sorted(chunks):
            if total <= _KEPT * self.max_bytes:
                break
            Path(chunk.path).unlink(missing_ok=True)
            total -= chunk.num_bytes
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
        self.path = path
        self.cache = cache
        self._dropped: set[int] = set()
        cache.make()
        self._remote = parse(str(path))
        with _storage_errors():
            info = self._remote.info()
        self.size = int(info["size"])
        version = sorted((key, str(value)) for key, value in info.items())
        name = blake2b(f"{path} {version}".encode(), digest_size=12).hexdigest()
        self.folder = cache.folder / "objects" / name

    @cached_property
    def local(self) -> Path:
        """A local file with the same content, fetched once per host."""
        path = self.folder / "whole"
        with self.cache.locked(path), disk_errors(path, needed=self.size, fix=_CURE):
            if not path.is_file():
                self._fetch_whole(path)
        return path

    def fetch_again(self) -> None:
        """Replace the local file, in which something is damaged."""
        path = self.folder / "whole"
        with self.cache.locked(path), disk_errors(path, needed=self.size, fix=_CURE):
            self._fetch_whole(path)

    def _fetch_whole(self, path: Path) -> None:
        """Download the object to a file with parallel requests of equal sizes."""

        def fetch_part(start: int) -> bytes:
            return self.fetch(start, start + _REQUEST_BYTES)

        starts = range(0, self.size, _REQUEST_BYTES)
        with (
            ThreadPoolExecutor(_REQUESTS) as pool,
            _temporary_file(path) as partial,
            partial.open("wb") as file,
        ):
            for data in pool.map(fetch_part, starts):
                file.write(data)

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop); fewer where the object ends."""
        stop = min(stop, self.size)
        first = start // BLOCK_BYTES
        last = -(-stop // BLOCK_BYTES)
        data = b"".join(map(self._read_chunk, range(first, last)))
        return data[start - first * BLOCK_BYTES : stop - first * BLOCK_BYTES]

    def drop(self, start: int) -> bool:
        """Remove the chunk with a damaged byte; True, once, if it can be fetched again."""
        chunk = start // BLOCK_BYTES
        is_first = chunk not in self._dropped
        self._dropped.add(chunk)
        (self.folder / str(chunk)).unlink(missing_ok=True)
        return is_first

    def fetch(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop) from the object storage; fewer where the object ends.

        Raises:
            EnvironmentFault: several requests have failed.
        """
        with _storage_errors():
            return self._remote.read(start, min(stop, self.size))

    def _read_chunk(self, number: int) -> bytes:
        """A chunk of BLOCK_BYTES from the cache, or fetched by one process and cached."""
        path = self.folder / str(number)
        start = number * BLOCK_BYTES
        size = min(BLOCK_BYTES, self.size - start)
        with disk_errors(path, needed=size, fix=_CURE):
            data = _read_complete(path, size)
            if data is not None:
                return data
            with self.cache.locked(path):
                data = _read_complete(path, size)
                if data is None:  # no other process has fetched it meanwhile
                    data = self.fetch(start, start + size)
                    self.cache.add(path, data)
                return data


class LocalCopy(LocalFile):
    """The whole of an object, in the cache."""

    def __init__(self, remote: RemoteFile) -> None:
        super().__init__(remote.local)
        self._remote = remote
        self._is_fetched_again = False

    def drop(self, start: int) -> bool:
        """Fetch the object again; True, once."""
        if self._is_fetched_again:
            return False
        self._is_fetched_again = True
        self._remote.fetch_again()
        os.close(self.__dict__.pop("_descriptor"))
        return True


CorpusFile = LocalFile | RemoteFile


def whole_file(file: CorpusFile) -> LocalFile:
    """A local file with the content of a file of a corpus; a damaged copy is fetched again."""
    return LocalCopy(file) if isinstance(file, RemoteFile) else file


@contextmanager
def _storage_errors() -> Iterator[None]:
    """Raise FileNotFoundError for a missing object, and name the flag in other faults."""
    try:
        yield
    except MissingObject as error:
        raise FileNotFoundError(error.what) from None
    except StorageFault as error:
        place = "the place is that of --data-path, and a run that is started again goes on"
        raise EnvironmentFault(error.what, why=error.why, fix=f"{error.fix}; {place}") from None


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
    if not isinstance(path, Address):
        return LocalFile(path) if path.is_file() else None
    try:
        return require_file(path, cache)
    except FileNotFoundError:
        return None


def local_folder(folder: Path) -> Path:
    """A local folder with the same files: itself, or the copy of a small one in object storage."""
    if not isinstance(folder, Address):
        return folder
    cache = ChunkCache.of(DataConfig())
    with _storage_errors():
        names = [name for name in parse(str(folder)).sizes() if "/" not in name]
    objects = [RemoteFile(folder / name, cache) for name in sorted(names)]
    versions = "".join(file.folder.name for file in objects)
    digest = blake2b(versions.encode(), digest_size=12).hexdigest()
    target = cache.folder / "folders" / digest
    for file in objects:
        copy = target / file.path.name
        if not copy.exists():
            with disk_errors(copy, fix=_CURE), _temporary_file(copy) as partial:
                shutil.copyfile(file.local, partial)
    return target


def _read_complete(path: Path, size: int) -> bytes | None:
    """The content of a chunk, which counts as used now; None if it is absent or incomplete.

    A power failure leaves incomplete files.
    """
    try:
        os.utime(path)
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return data if len(data) == size else None


@contextmanager
def _temporary_file(path: Path) -> Iterator[Path]:
    """A temporary file that gets its name when the block ends."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield partial
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
