"""The calls by which gcsfs, adlfs and huggingface_hub list objects, over objects in memory.

Their pages were compared with those of the clients themselves against a local server: gcsfs
2026.10.1, adlfs 2026.8.0 and huggingface_hub 2.4.0.
"""

from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

from fsspec.asyn import get_loop
from fsspec.implementations.memory import MemoryFileSystem

SIZE = 1


class ResourceNotFoundError(Exception):
    """Azure's error for what is missing."""


class EntryNotFoundError(Exception):
    """The hub's error for a folder that is missing."""


class PagedMemory(MemoryFileSystem):
    """Objects in memory, listed in pages of two."""

    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    page_size = 2
    num_pages = 0  # that were asked for

    def listed(self, bucket: str, prefix: str, start: int) -> tuple[list[tuple[str, int]], str]:
        """Names and sizes of a page, and the token of the next one, empty at the end."""
        type(self).num_pages += 1
        if not self.isdir(bucket):
            raise FileNotFoundError(bucket)
        found = self.find(bucket, detail=True)
        paths = [path for path in found if path.lstrip("/").startswith(f"{bucket}/{prefix}")]
        last = start + self.page_size
        entries = []
        for path in paths[start:last]:
            entries.append((path.lstrip("/").partition("/")[2], found[path]["size"]))
        return entries, str(last) if last < len(paths) else ""

    def call(
        self,
        method: str,
        path: str,
        bucket: str,
        *,
        json_out: bool,
        prefix: str,
        pageToken: str = "0",
    ) -> dict[str, Any]:
        """gcsfs."""
        assert (method, path, json_out) == ("GET", "b/{}/o", True)
        entries, token = self.listed(bucket, prefix, int(pageToken))
        items = [{"name": name, "size": str(size)} for name, size in entries]
        page: dict[str, Any] = {"kind": "storage#objects"}
        if items:
            page["items"] = items
        if token:
            page["nextPageToken"] = token
        return page

    @property
    def loop(self) -> Any:
        """adlfs."""
        return get_loop()

    @property
    def service_client(self) -> Any:
        """adlfs."""
        return SimpleNamespace(get_container_client=lambda container: Container(self, container))

    async def _details(self, blobs: list[tuple[str, int]]) -> list[dict[str, Any]]:
        return [{"name": path, "size": size, "type": "file"} for path, size in blobs]

    def resolve_path(self, path: str) -> Any:
        """huggingface_hub."""
        bucket, _, inside = path.partition("/")
        return SimpleNamespace(
            repo_id=bucket, path=inside, revision="main", repo_type="model", root=bucket
        )

    @property
    def _api(self) -> Any:
        return SimpleNamespace(list_repo_tree=self._list_repo_tree)

    def _list_repo_tree(self, repo_id: str, path: str | None, **options: Any) -> Iterator[Any]:
        assert options == {"recursive": True, "revision": "main", "repo_type": "model"}
        token = "0"
        while token:
            entries, token = self.listed(repo_id, f"{path}/" if path else "", int(token))
            if not entries:
                raise EntryNotFoundError(path)
            yield SimpleNamespace(path="a folder")
            for name, size in entries:
                yield SimpleNamespace(path=name, size=size)


class Container:
    """Azure's client of a container."""

    def __init__(self, memory: PagedMemory, name: str) -> None:
        self.memory = memory
        self.name = name
        self.continuation_token: str | None = None

    async def __aenter__(self) -> "Container":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def list_blobs(self, include: list[str], name_starts_with: str) -> "Container":
        self.prefix = name_starts_with
        return self

    def by_page(self, continuation_token: str | None) -> "Container":
        self.continuation_token = continuation_token
        return self

    async def __anext__(self) -> AsyncIterator[tuple[str, int]]:
        start = int(self.continuation_token or "0")
        try:
            entries, self.continuation_token = self.memory.listed(self.name, self.prefix, start)
        except FileNotFoundError as error:
            raise ResourceNotFoundError(self.name) from error

        async def blobs() -> AsyncIterator[tuple[str, int]]:
            for name, size in entries:
                yield f"{self.name}/{name}", size

        return blobs()


class Endless(PagedMemory):
    """A listing without an end."""

    page_size = 1000

    def listed(self, bucket: str, prefix: str, start: int) -> tuple[list[tuple[str, int]], str]:
        type(self).num_pages += 1
        names = [(f"{prefix}{number}", SIZE) for number in range(start, start + self.page_size)]
        return names, str(start + max(self.page_size, 1))
