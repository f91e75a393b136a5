"""Pages of the listing of a folder, by scheme, so that an endless one ends while it is read.

    s3   list_objects_v2          gs   objects.list of the JSON API
    az   list_blobs, by page      hf   the tree of a repository or bucket: one page, cut at a limit

A page has the token of the next one, so that only a page is requested again after a fault.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Folder:
    """The objects of a bucket whose names begin with a prefix."""

    bucket: str
    prefix: str  # ends with a slash; empty for the whole bucket
    limit: int  # entries after which a client that sends no pages stops


@dataclass(frozen=True)
class Page:
    """Objects of a listing."""

    objects: dict[str, dict[str, Any]]  # facts of the objects by their paths, bucket included
    num_entries: int  # folders included
    next_token: str | None  # None: there is no further page


def list_s3(client: Any, folder: Folder, *, token: str | None) -> Page:
    """A page of s3fs."""
    options = {} if token is None else {"ContinuationToken": token}
    page = client.call_s3("list_objects_v2", Bucket=folder.bucket, Prefix=folder.prefix, **options)
    objects = {}
    for entry in page.get("Contents", []):
        objects[f"{folder.bucket}/{entry['Key']}"] = {**entry, "size": entry["Size"]}
    next_token = page.get("NextContinuationToken", "") if page.get("IsTruncated") else None
    return Page(objects, len(objects), next_token)


def list_gs(client: Any, folder: Folder, *, token: str | None) -> Page:
    """A page of gcsfs."""
    options = {} if token is None else {"pageToken": token}
    page = client.call(
        "GET", "b/{}/o", folder.bucket, json_out=True, prefix=folder.prefix, **options
    )
    objects = {}
    for entry in page.get("items", []):
        objects[f"{folder.bucket}/{entry['name']}"] = entry
    return Page(objects, len(objects), page.get("nextPageToken"))


def list_az(client: Any, folder: Folder, *, token: str | None) -> Page:
    """A page of adlfs."""
    from fsspec.asyn import sync

    page: Page = sync(client.loop, _list_blobs, client, folder, token=token)
    return page


async def _list_blobs(client: Any, folder: Folder, *, token: str | None) -> Page:
    """A page of Azure's client; a missing container raises the same error as elsewhere."""
    async with client.service_client.get_container_client(container=folder.bucket) as container:
        blobs = container.list_blobs(include=["metadata"], name_starts_with=folder.prefix)
        pages = blobs.by_page(continuation_token=token)
        try:
            page = await anext(pages)
            listed = [blob async for blob in page]
        except Exception as error:
            if type(error).__name__ == "ResourceNotFoundError":
                raise FileNotFoundError(str(error)) from error
            raise
        details = await client._details(listed)
    objects = {entry["name"]: entry for entry in details if entry["type"] == "file"}
    return Page(objects, len(listed), pages.continuation_token or None)


def list_hf(client: Any, folder: Folder, *, token: str | None) -> Page:
    """The entries of huggingface_hub up to the limit; its pages have no tokens."""
    place = client.resolve_path(f"{folder.bucket}/{folder.prefix}".rstrip("/"))
    if hasattr(place, "bucket_id"):
        tree = client._api.list_bucket_tree(place.bucket_id, place.path, recursive=True)
    else:
        tree = client._api.list_repo_tree(
            place.repo_id,
            place.path or None,
            recursive=True,
            revision=place.revision,
            repo_type=place.repo_type,
        )
    objects = {}
    num_entries = 0
    try:
        for entry in tree:
            num_entries += 1
            if num_entries > folder.limit:
                break
            if hasattr(entry, "size"):
                objects[f"{place.root}/{entry.path}"] = vars(entry)
    except Exception as error:
        if type(error).__name__ != "EntryNotFoundError":
            raise
    return Page(objects, num_entries, None)


ListPage = Callable[..., Page]  # client and folder; token of a page, None for the first
LISTINGS: dict[str, ListPage] = {"s3": list_s3, "gs": list_gs, "az": list_az, "hf": list_hf}
