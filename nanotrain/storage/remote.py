"""`Remote`: a file or folder of an object store, read, written, listed and deleted through fsspec.

    is_address, parse      whether a text is SCHEME://..., and the `Remote` of it
    Remote.read            a range of bytes, in one request; short replies are requested again
    Remote.sizes           size and time of every object below a folder, by one listing of bounded
                           length (listing.py)
    Remote.put, .write     a file in parts, or bytes: whole objects, never half of one
    Remote.delete          in batches

Every request that fails for a reason that may pass is repeated, in one loop: a client's own is
switched off where it has one. A store that does not answer is named in the log after ten seconds.
Credentials are those of the provider's usual places, never part of an address.
"""

import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from nanotrain.errors import ConfigError, StorageFault
from nanotrain.storage.faults import cause_of
from nanotrain.storage.listing import LISTINGS, Folder, Page
from nanotrain.waiting import Wait

PART_BYTES = 8 * 2**20  # part of an upload or a download
MAX_PARTS = 9_000  # parts of an upload; providers take 10,000 per file
CONCURRENCY = 4  # parts of an upload that a rank holds at once
ATTEMPTS = 6
FIRST_PAUSE_S = 0.1  # between attempts; it doubles
ANSWER_S = 120.0  # silence of one attempt; the clients notice most of it after 60 s
TIMEOUT_S = 300.0  # silence of all attempts together
MAX_LISTED = 500_000  # objects of a run: 480 checkpoints of 1,024 ranks
SMALLEST_PAGE = 100  # objects that a page counts as, so that empty ones end too
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)
_SECRETS = re.compile(r"(?<=://)[^/@\s]+@|\?[^\s\"']+")
Result = TypeVar("Result")


@dataclass(frozen=True)
class _Provider:
    """The client of one scheme."""

    package: str
    client: dict[str, Any]  # options of the client
    upload: Callable[[int], dict[str, Any]]  # options of an upload by the size of its parts


ONE_ATTEMPT = {
    "retries": {"total_max_attempts": 1},
    "connect_timeout": 10,
    "read_timeout": 60,
}
SCHEMES = {
    "s3": _Provider(
        "s3fs",
        client={"config_kwargs": ONE_ATTEMPT},
        upload=lambda part: {"chunksize": part, "max_concurrency": CONCURRENCY},
    ),
    "gs": _Provider("gcsfs", client={}, upload=lambda part: {"chunksize": part}),
    "az": _Provider("adlfs", client={}, upload=lambda part: {"max_concurrency": CONCURRENCY}),
    "hf": _Provider("huggingface_hub", client={}, upload=lambda part: {}),
}


class MissingObject(StorageFault):
    """An object or bucket that does not exist."""


class Stat(NamedTuple):
    """Size in bytes of an object, and a version that changes with the content."""

    size: int
    changed: float  # by the clock of the store: only for display and for equality
    version: str = ""  # the provider's tag of the content; empty if it has none


def is_address(text: str) -> bool:
    """Whether a text names a place by SCHEME://.

    >>> is_address("s3://bucket/run"), is_address("runs/tiny")
    (True, False)
    """
    return _ADDRESS.match(text) is not None


def parse(text: str) -> "Remote":
    """The place that an address names.

    Raises:
        ConfigError: an unknown scheme, no bucket, credentials or a query in the address.
    """
    match = _ADDRESS.match(text)
    assert match is not None, "callers check is_address"
    scheme = match[1].lower()
    path = match[2].strip("/")
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ConfigError(
            f"{redacted(text)} cannot be reached",
            why=f"known are {known} and paths on this machine",
            fix="mount it and name the folder",
        )
    if not is_plain_path(path):
        raise ConfigError(
            f"{redacted(text)} is no address",
            why="an address is SCHEME://BUCKET/NAME, without user, password, query, patterns and "
            "empty or dotted parts",
            fix="give credentials in the provider's usual place (docs/remote_storage.md)",
        )
    return Remote(scheme, path)


def is_plain_path(path: str) -> bool:
    """Whether a path is a bucket and a name, without credentials, queries and patterns."""
    if re.search(r"[@?#*\[\x00-\x20]", path):
        return False
    return not any(part in ("", ".", "..") for part in path.split("/"))


def redacted(text: str) -> str:
    """A text without the users, passwords and queries of addresses in it.

    >>> redacted("s3://me:secret@bucket/run?token=1 failed")
    's3://bucket/run failed'
    """
    return _SECRETS.sub("", text)


@dataclass(frozen=True)
class Remote:
    """A file or folder of an object store.

    Args:
        scheme: a key of SCHEMES.
        path: bucket and name, without slashes at the ends.
        timeout_s: seconds without an answer after which a request fails.
    """

    scheme: str
    path: str
    timeout_s: float = field(default=TIMEOUT_S, compare=False)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}"

    def __truediv__(self, name: str) -> "Remote":
        return replace(self, path=f"{self.path}/{name}")

    @property
    def parent(self) -> "Remote":
        """The folder above."""
        return replace(self, path=self.path.rpartition("/")[0])

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes from `start` to `stop`, which lies inside the object; None: to its end.

        Raises:
            StorageFault: they cannot be read.
        """

        def request(wait: Wait) -> bytes:
            is_whole = start == 0 and stop is None
            first = None if is_whole else start
            data: bytes = self._client().cat_file(self.path, start=first, end=stop)
            if stop is not None and len(data) != stop - start:
                raise EOFError(f"{len(data):,} of {stop - start:,} bytes arrived")
            return data

        return self._retried("read", request)

    def download(self, file: Path, size: int) -> None:
        """Write the object of `size` bytes into a file, in parts."""
        with file.open("wb") as out:
            for start in range(0, size, PART_BYTES):
                out.write(self.read(start, min(start + PART_BYTES, size)))

    def info(self) -> dict[str, Any]:
        """The provider's facts of the object: its size and fields that differ between its versions.

        Raises:
            MissingObject: there is none.
            StorageFault: it cannot be reached.
        """
        return dict(self._retried("opened", lambda wait: self._client().info(self.path)))

    def stat(self) -> Stat:
        """Size and version of the object; raises as `info`."""
        return _stat(self.info())

    def sizes(self) -> dict[str, Stat]:
        """The objects below this folder, by their names from here on; empty where there is none.

        Raises:
            MissingObject: the bucket does not exist.
            StorageFault: they cannot be listed, or are more than MAX_LISTED.
        """
        prefix = f"{self.path}/"
        sizes = {}
        num_listed = 0
        for page in self._pages():
            num_listed += max(page.num_entries, SMALLEST_PAGE)
            if num_listed > MAX_LISTED:
                raise StorageFault(
                    f"{self} cannot be listed",
                    why=f"it has more than {MAX_LISTED:,} objects",
                    fix="name a folder in it",
                )
            for path, entry in page.objects.items():
                name = path.lstrip("/")
                if name.startswith(prefix):
                    sizes[name.removeprefix(prefix)] = _stat(entry)
        return sizes

    def _pages(self) -> Iterator[Page]:
        """The pages of the listing of this folder."""
        inside = self.path.removeprefix(self._bucket).strip("/")
        prefix = f"{inside}/" if inside else ""
        folder = Folder(self._bucket, prefix, limit=MAX_LISTED)
        list_page = LISTINGS[self.scheme]

        def request(token: str | None, wait: Wait) -> Page:
            return list_page(self._client(), folder, token=token)

        token: str | None = None
        is_last = False
        while not is_last:
            page: Page = self._retried("listed", partial(request, token))
            yield page
            token = page.next_token
            is_last = token is None

    @property
    def _bucket(self) -> str:
        return self.path.partition("/")[0]

    def put(self, file: Path) -> None:
        """Replace the object by a file of this machine, in parts of bounded size.

        Raises:
            StorageFault: it cannot be written; the old object is unchanged.
        """
        part = max(PART_BYTES, -(-file.stat().st_size // MAX_PARTS))
        options = SCHEMES[self.scheme].upload(part)

        def request(wait: Wait) -> None:
            callback = _progress_callback(wait)
            self._client().put_file(str(file), self.path, callback=callback, **options)

        self._retried("written", request)

    def write(self, data: bytes) -> None:
        """Replace the object by bytes."""
        self._retried("written", lambda wait: self._client().pipe_file(self.path, data))

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects below this folder; an object that is gone already is no error."""
        paths = [f"{self.path}/{name}" for name in names]
        for first in range(0, len(paths), 1000):  # a request of most providers
            batch = paths[first : first + 1000]
            self._retried("deleted", partial(self._delete_batch, batch), missing_ok=True)

    def _delete_batch(self, paths: list[str], wait: Wait) -> None:
        self._client().rm(paths)

    def _client(self) -> Any:
        """The file system of the provider."""
        provider = SCHEMES[self.scheme]
        try:
            importlib.import_module(provider.package)
            import fsspec
        except ImportError as error:
            packages = f"nanotrain[{self.scheme}]"
            if self.scheme == "hf":
                packages = "huggingface_hub fsspec"
            raise ConfigError(
                f"{self} needs {provider.package}",
                why=f"no {error.name} here",
                fix=f"pip install {packages}",
            ) from None
        client = fsspec.filesystem(self.scheme, use_listings_cache=False, **provider.client)
        if self.scheme == "s3":
            client.retries = 1  # s3fs has a loop of its own around each request
        return client

    def _retried(
        self, what: str, request: Callable[[Wait], Result], *, missing_ok: bool = False
    ) -> Result | Any:
        """Send a request again while its failure may pass; the pauses grow.

        Args:
            what: the request as a participle, for the error.
            request: sends it once; between the parts of a long one it moves the wait.
            missing_ok: whether a missing object is no error.
        """
        wait = Wait(f"{self} does not answer (to be {what})", self.timeout_s)
        for attempt in range(ATTEMPTS):
            try:
                return wait.call(partial(request, wait), limit_s=ANSWER_S)
            except (ConfigError, KeyboardInterrupt):
                raise
            except FileNotFoundError as error:
                if missing_ok:
                    return None
                raise self._fault(what, error) from None
            except Exception as error:  # the providers' errors have no class in common
                is_last = attempt + 1 == ATTEMPTS or wait.is_over
                if is_last or not cause_of(error).may_pass:
                    raise self._fault(what, error) from None
            wait.pause(FIRST_PAUSE_S * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    def _fault(self, what: str, error: Exception) -> StorageFault:
        """The error for a request that failed."""
        reason = " ".join(redacted(f"{error}").split())[:400] or type(error).__name__
        if isinstance(error, FileNotFoundError):
            fix = "make the bucket, or name another place"
            return MissingObject(f"{self} cannot be {what}", why=reason, fix=fix)
        return StorageFault(f"{self} cannot be {what}", why=reason, fix=cause_of(error).fix)


def _progress_callback(wait: Wait) -> Any:
    """A callback of fsspec that records progress of a wait with every part."""
    from fsspec.callbacks import Callback

    class RecordProgress(Callback):
        def call(self, *args: object, **options: object) -> None:
            wait.move()

    return RecordProgress()


def _stat(entry: dict[str, Any]) -> Stat:
    """The facts of an object, under the names that a provider gives them."""
    tags = (entry.get(key) for key in ("ETag", "etag", "md5Hash", "generation", "oid", "blob_id"))
    version = next((str(tag) for tag in tags if tag), "")
    return Stat(int(entry["size"]), _time_of_change(entry), version)


def _time_of_change(entry: dict[str, Any]) -> float:
    """The time of the last change, from the entry that the provider has for it; 0 if none."""
    for key in ("LastModified", "last_modified", "updated", "mtime"):
        value = entry.get(key)
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        if value is not None:
            return value.timestamp() if isinstance(value, datetime) else float(value)
    return 0.0
