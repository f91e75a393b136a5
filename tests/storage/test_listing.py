"""Listings of every provider: pages are whole, and an endless one ends while it is read."""

import pytest

from nanotrain.errors import StorageFault
from nanotrain.storage import remote
from nanotrain.storage.listing import LISTINGS
from nanotrain.storage.remote import MissingObject, Remote, parse
from tests.storage.paged_memory import Endless, PagedMemory

SCHEMES = ["gs", "az", "hf"]  # s3 has a server in test_remote.py


def use(client: type[PagedMemory], monkeypatch: pytest.MonkeyPatch) -> type[PagedMemory]:
    """A new client in the place of a provider's."""
    fresh = type("Fresh", (client,), {"store": {}, "pseudo_dirs": [""], "num_pages": 0})
    monkeypatch.setattr(Remote, "_client", lambda self: fresh())
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.0)
    return fresh


def test_every_scheme_has_a_listing() -> None:
    assert LISTINGS.keys() == remote.SCHEMES.keys() == {"s3", *SCHEMES}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_listing_of_several_pages_is_whole(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = use(PagedMemory, monkeypatch)
    names = ["1", "2", "3/4", "3/5", "6"]
    for name in names:
        client().pipe_file(f"bucket/run/{name}", b"xyz")
    client().pipe_file("bucket/run-2/other", b"")
    assert {name: stat.size for name, stat in parse(f"{scheme}://bucket/run").sizes().items()} == (
        dict.fromkeys(names, 3)
    )
    assert client.num_pages == 3
    assert parse(f"{scheme}://bucket").sizes().keys() == (
        {*(f"run/{name}" for name in names), "run-2/other"}
    )
    assert parse(f"{scheme}://bucket/none").sizes() == {}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_missing_bucket_is_named(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(PagedMemory, monkeypatch)
    with pytest.raises(MissingObject, match=f"{scheme}://no-bucket/run cannot be listed"):
        parse(f"{scheme}://no-bucket/run").sizes()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_endless_listing_ends_while_it_is_read(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = use(Endless, monkeypatch)
    monkeypatch.setattr(remote, "MAX_LISTED", 5000)
    with pytest.raises(StorageFault, match="it has more than 5,000 objects; name a folder in it"):
        parse(f"{scheme}://bucket/run").sizes()
    assert client.num_pages in (5, 6)


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_endless_empty_pages_end_too(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = use(type("Empty", (Endless,), {"page_size": 0}), monkeypatch)
    monkeypatch.setattr(remote, "MAX_LISTED", 5000)
    with pytest.raises(StorageFault, match="it has more than 5,000 objects"):
        parse(f"{scheme}://bucket/run").sizes()
    assert client.num_pages == 51


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_fault_in_a_listing_repeats_a_page_and_loses_none(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = use(PagedMemory, monkeypatch)
    for number in range(5):
        client().pipe_file(f"bucket/run/{number}", b"x")
    listed = client.listed
    faults = iter([False, True])

    def fail_once(self: PagedMemory, *args: object) -> object:
        if next(faults, False):
            raise ConnectionResetError("reset by the store")
        return listed(self, *args)

    monkeypatch.setattr(client, "listed", fail_once)
    assert parse(f"{scheme}://bucket/run").sizes().keys() == {"0", "1", "2", "3", "4"}
