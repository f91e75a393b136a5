"""Objects of a real S3 server: ranges, listings; faults are repeated or named; nothing is half
written.
"""

import os
import random
import socket
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

import pytest

from nanotrain.errors import ConfigError, StorageFault
from nanotrain.storage import remote
from nanotrain.storage.remote import MissingObject, parse
from tests import s3_server
from tests.storage.paged_memory import PagedMemory
from tests.test_two_hosts import DRILLS


@pytest.fixture(scope="module")
def bucket() -> str:
    return s3_server.make_bucket("remote-tests")


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.without_pauses(monkeypatch)


def test_objects_are_written_read_in_ranges_listed_and_deleted(bucket: str, tmp_path: Path) -> None:
    folder = parse(f"{bucket}/a/b")
    assert folder.sizes() == {}
    (folder / "one").write(b"0123456789")
    file = tmp_path / "two"
    file.write_bytes(bytes(300))
    (folder / "sub/two").put(file)
    assert (folder / "one").read(2, 5) == b"234" and (folder / "one").read() == b"0123456789"
    assert {name: stat.size for name, stat in folder.sizes().items()} == {"one": 10, "sub/two": 300}
    assert folder.sizes()["one"].changed > 1e9
    (folder / "sub/two").download(tmp_path / "back", 300)
    assert (tmp_path / "back").read_bytes() == bytes(300)
    folder.delete(["one", "sub/two", "gone"])
    assert folder.sizes() == {}
    with pytest.raises(MissingObject, match="a/b/one cannot be read"):
        (folder / "one").read()


@pytest.mark.parametrize(("num_objects", "num_pages"), [(1000, 6), (0, 51)])
def test_an_endless_listing_ends_while_it_is_read(
    num_objects: int, num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[dict[str, str]] = []

    class Endless:
        def call_s3(self, method: str, **options: str) -> dict[str, object]:
            assert method == "list_objects_v2" and options["Prefix"] == "run/"
            pages.append(options)
            keys = [f"run/{len(pages)}-{number}" for number in range(num_objects)]
            contents = [{"Key": key, "Size": 1} for key in keys]
            token = str(len(pages))
            return {"Contents": contents, "IsTruncated": True, "NextContinuationToken": token}

    monkeypatch.setattr(remote.Remote, "_client", lambda self: Endless())
    monkeypatch.setattr(remote, "MAX_LISTED", 5000)
    with pytest.raises(StorageFault, match="it has more than 5,000 objects; name a folder in it"):
        parse("s3://bucket/run").sizes()
    assert len(pages) == num_pages
    assert pages[2]["ContinuationToken"] == "2"


def test_a_listing_of_several_pages_is_whole(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = parse(f"{bucket}/pages")
    for number in range(5):
        (folder / f"{number}").write(b"x")
    client = type(folder._client())
    call = client.call_s3
    monkeypatch.setattr(
        client, "call_s3", lambda self, *args, **more: call(self, *args, MaxKeys=2, **more)
    )
    with s3_server.server().counted() as requests:
        names = sorted(folder.sizes())
    assert names == ["0", "1", "2", "3", "4"] and len(requests) == 3


def test_a_large_file_is_sent_in_parts_of_which_few_are_in_memory(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert remote.CONCURRENCY * remote.PART_BYTES <= 64 * 2**20
    monkeypatch.setattr(remote, "PART_BYTES", 5 * 2**20)
    file = tmp_path / "large"
    file.write_bytes(random.Random(0).randbytes(16 * 2**20))
    with s3_server.server().counted() as requests:
        (parse(bucket) / "large").put(file)
    # and one to start, one to complete
    assert sum("partNumber" in request.query for request in requests) == 4
    assert len(requests) == 6
    (parse(bucket) / "large").download(tmp_path / "back", file.stat().st_size)
    assert (tmp_path / "back").read_bytes() == file.read_bytes()


@pytest.mark.parametrize("fault", ["500", "reset", "truncated", "short", "slow"])
def test_a_fault_that_passes_is_not_seen(bucket: str, fault: str) -> None:
    once = iter([fault])
    (parse(bucket) / "x").write(b"0123456789" * 100)
    with s3_server.server().faults(
        lambda request: next(once, None) if request.method == "GET" else None
    ):
        assert (parse(bucket) / "x").read(0, 1000) == b"0123456789" * 100


def test_an_object_that_is_shorter_than_what_is_read_is_named(bucket: str) -> None:
    (parse(bucket) / "shrunk").write(b"0123456789")
    with pytest.raises(StorageFault, match="shrunk cannot be read: 10 of 20 bytes arrived"):
        (parse(bucket) / "shrunk").read(0, 20)


@pytest.mark.parametrize(
    ("fault", "reason", "fix"),
    [
        ("denied", "Access Denied", "credentials"),
        ("skewed", "time", "clock"),
        ("500", "planted", "try again"),
    ],
)
def test_a_fault_that_stays_is_one_error_with_the_providers_reason(
    bucket: str, fault: str, reason: str, fix: str
) -> None:
    with s3_server.server().faults(lambda request: fault), pytest.raises(StorageFault) as caught:
        (parse(bucket) / "y").write(b"1")
    assert (
        reason in caught.value.why
        and fix in caught.value.fix
        and "test-secret" not in str(caught.value)
    )


def test_a_missing_bucket_and_a_dead_network_are_named(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        MissingObject, match="no-such-bucket.*bucket does not exist.*make the bucket"
    ):
        parse("s3://no-such-bucket/run").sizes()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("s3fs.S3FileSystem.cachable", False)
    with pytest.raises(StorageFault, match="connect.*check the network"):
        parse("s3://b/run").sizes()


@pytest.fixture
def fresh_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("s3fs.S3FileSystem.cachable", False)


def test_words_in_a_url_do_not_make_a_dead_network_a_refusal(
    monkeypatch: pytest.MonkeyPatch, fresh_clients: None
) -> None:
    """Every upload of `tokenizer/...` has "token" in it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    attempts = []
    client = remote.Remote._client
    monkeypatch.setattr(
        remote.Remote, "_client", lambda self: attempts.append(self) or client(self)
    )
    with pytest.raises(StorageFault, match="check the network"):
        parse("s3://b/run/tokenizer/denied-signature.json").write(b"")
    assert len(attempts) == remote.ATTEMPTS


def test_an_unknown_profile_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch, fresh_clients: None
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "typo")
    with pytest.raises(StorageFault, match=r"profile \(typo\).*name a profile") as caught:
        parse("s3://b/run").sizes()
    assert "try again" not in str(caught.value)


@pytest.mark.parametrize("reads", [False, True])
def test_a_store_that_accepts_and_never_answers_is_named_and_given_up(
    reads: bool,
    monkeypatch: pytest.MonkeyPatch,
    fresh_clients: None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("nanotrain.waiting.NAMED_AFTER_S", 0.2)
    file = tmp_path / "large"
    file.write_bytes(bytes(9 * 2**20))  # more than the buffers of a connection hold
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        place = remote.Remote("s3", "b/run/x", timeout_s=1.0)
        start = time.monotonic()
        with caplog.at_level("WARNING", "nanotrain"), pytest.raises(StorageFault) as caught:
            place.read() if reads else place.put(file)
    assert 1.0 <= time.monotonic() - start < 3.0
    assert "no answer for 1" in caught.value.why and "check the network" in caught.value.fix
    what = "read" if reads else "written"
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"s3://b/run/x does not answer (to be {what}) for ")
    assert line.endswith(" s; this ends after 1 s")


def test_one_loop_repeats_a_request(bucket: str) -> None:
    """The client has another, of five, which would make thirty requests of six."""
    with (
        s3_server.server().faults(lambda request: "500"),
        s3_server.server().counted() as requests,
        pytest.raises(StorageFault),
    ):
        (parse(bucket) / "y").read()
    assert len(requests) == remote.ATTEMPTS


def test_a_password_in_the_text_of_a_provider_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    class Provider:
        def pipe_file(self, path: str, data: bytes) -> None:
            raise PermissionError("denied by https://me:hidden@host/b?token=hidden")

    monkeypatch.setattr(remote.Remote, "_client", lambda self: Provider())
    with pytest.raises(StorageFault, match="denied by https://host/b;") as caught:
        parse("gs://b/run").write(b"")
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ftp://host/run", "known are s3://, gs://, az://, hf://"),
        ("s3://me:hidden@bucket/run", "without user"),
        ("s3://bucket/run?token=hidden", "without user"),
        ("s3://bucket/../run", "dotted parts"),
        ("s3://", "SCHEME://BUCKET/NAME"),
    ],
)
def test_other_addresses_are_refused_without_their_secrets(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        parse(text)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "package", "command"),
    [
        ("s3", "s3fs", r"nanotrain\[s3\]"),
        ("gs", "gcsfs", r"nanotrain\[gs\]"),
        ("az", "adlfs", r"nanotrain\[az\]"),
        ("hf", "huggingface_hub", "huggingface_hub fsspec"),
    ],
)
def test_a_missing_package_is_one_line_with_the_command(
    scheme: str, package: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ConfigError, match=rf"{scheme}://b/run needs {package}.*pip install {command}"
    ):
        parse(f"{scheme}://b/run").sizes()


@pytest.mark.parametrize("scheme", ["gs", "az", "hf"])
def test_the_code_of_other_schemes_runs_on_objects_in_memory(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system of fsspec in the place of the provider's: it is called as theirs are."""
    package = remote.SCHEMES[scheme].package
    monkeypatch.setitem(sys.modules, package, ModuleType(package))
    memory = type("InMemory", (PagedMemory,), {"store": {}, "pseudo_dirs": [""]})
    monkeypatch.setattr("fsspec.filesystem", lambda name, **options: memory())
    folder, file = parse(f"{scheme}://bucket/run"), tmp_path / "file"
    memory().mkdir("bucket")
    assert folder.sizes() == {}
    file.write_bytes(b"0123456789")
    (folder / "a/one").put(file)
    (folder / "two").write(b"2")
    sizes = {name: stat.size for name, stat in folder.sizes().items()}
    assert sizes == {"a/one": 10, "two": 1} and (folder / "a/one").info()["size"] == 10
    assert (folder / "a/one").read(2, 5) == b"234" and (folder / "two").read() == b"2"
    (folder / "a/one").download(tmp_path / "back", 10)
    assert (tmp_path / "back").read_bytes() == b"0123456789"
    with pytest.raises(MissingObject, match=f"{scheme}://bucket/run/three cannot be read"):
        (folder / "three").read()
    folder.delete(["a/one", "two"])
    assert folder.sizes() == {}


def test_random_faults_lose_nothing_and_are_named(bucket: str) -> None:
    """A share of them; with the drills, two hundred writes."""
    num_writes = 200 if os.environ.get(DRILLS) else 40
    draw, folder, there = random.Random(3), parse(f"{bucket}/faulty"), dict[str, bytes]()
    kinds, num_named = (None, None, None, "500", "reset", "truncated", "denied"), 0
    for _ in range(num_writes):
        name, data = f"{draw.randrange(8)}", draw.randbytes(draw.randrange(1, 2000))
        allowed = [data]
        with s3_server.server().faults(lambda request: draw.choice(kinds)):
            try:
                (folder / name).write(data)
                assert (folder / name).read(0, len(data)) == data
            except StorageFault as error:  # the old object or the new one, whole
                assert str(folder / name) in error.what and error.why and error.fix
                allowed, num_named = [data, there.get(name, b"")], num_named + 1
        there[name] = (folder / name).read() if name in folder.sizes() else b""
        assert there[name] in allowed
    assert num_writes / 10 < num_named < num_writes * 0.9
    assert all((folder / name).read() == data for name, data in there.items() if data)


@pytest.mark.parametrize(
    ("size", "part"), [(0, 8), (8, 8), (24, 8), (25, 9), (27, 9), (28, 10), (1000, 334)]
)
def test_a_file_is_uploaded_in_at_most_as_many_parts_as_providers_take(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: int, part: int
) -> None:
    monkeypatch.setattr(remote, "PART_BYTES", 8)
    monkeypatch.setattr(remote, "MAX_PARTS", 3)
    options = []

    class Client:
        def put_file(self, *names: str, callback: object, **given: int) -> None:
            options.append(given)

    monkeypatch.setattr(remote.Remote, "_client", lambda self: Client())
    file = tmp_path / "file"
    file.write_bytes(bytes(size))
    for scheme in ("s3", "gs"):
        parse(f"{scheme}://bucket/file").put(file)
        assert options.pop()["chunksize"] == part and -(-size // part) <= 3


@pytest.mark.parametrize("count", [0, 1, 999, 1000, 1001, 2000, 2500])
def test_every_object_is_deleted_in_requests_that_providers_take(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    requests: list[list[str]] = []

    class Client:
        def rm(self, paths: list[str]) -> None:
            requests.append(paths)

    monkeypatch.setattr(remote.Remote, "_client", lambda self: Client())
    parse("s3://bucket/run").delete(str(number) for number in range(count))
    assert sum(requests, []) == [f"bucket/run/{number}" for number in range(count)]
    assert all(0 < len(paths) <= 1000 for paths in requests)


@pytest.mark.parametrize("tag", ["ETag", "etag", "md5Hash", "generation", "oid", "blob_id"])
@pytest.mark.parametrize("clock", ["LastModified", "last_modified", "updated", "mtime"])
def test_size_time_and_version_are_read_under_the_names_of_every_provider(
    tag: str, clock: str
) -> None:
    moment = datetime(2026, 11, 29, 2, 30, tzinfo=UTC)
    for time_of in (moment, moment.isoformat(), moment.timestamp()):
        stat = remote._stat({"size": "7", tag: "v1", clock: time_of, "name": "x"})
        assert stat == (7, moment.timestamp(), "v1")
    assert remote._stat({"size": 7, tag: None, clock: None}) == (7, 0.0, "")


def test_a_name_is_appended_and_taken_off_again() -> None:
    folder = parse("s3://bucket/run")
    assert str(folder / "checkpoints" / "step-1") == "s3://bucket/run/checkpoints/step-1"
    assert (folder / "checkpoints" / "step-1").parent == folder / "checkpoints"
    assert str(folder.parent) == "s3://bucket"
