"""Token files in object storage: the same samples as from a disk, one request per chunk and host, a
bounded cache.
"""

import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from nanotrain.config.config import DataConfig
from nanotrain.data import checksums, loader, remote
from nanotrain.data.build import build_data, fingerprints
from nanotrain.data.indexed import IndexedTokens
from nanotrain.data.loader import GlobalBatchLoader
from nanotrain.data.remote import ChunkCache, open_file, require_file
from nanotrain.data.run_tokenizer import tokenizer_of
from nanotrain.data.sampler import SamplerConfig
from nanotrain.data.token_format import bin_path, mask_path, sums_path
from nanotrain.data.tokenizer import ByteTokenizer, load_tokenizer
from nanotrain.data.whole import WholeSplit
from nanotrain.errors import ConfigError, DataError, EnvironmentFault
from nanotrain.paths import Address
from nanotrain.storage import remote as storage
from nanotrain.storage.listing import LISTINGS, Folder, Page
from tests.data.conftest import random_documents, write_documents

CHUNK = 256
LENGTHS = [300, 1, 700, 40, 900, 60] * 4


class Store:
    """A pair on the disk and the same in the memory file system, whose ranged requests are counted,
    and may fail.
    """

    def __init__(self, folder: Path, cache: Path) -> None:
        self.local, self.cache = folder / "web", cache
        write_documents(self.local, random_documents(LENGTHS))
        mask_path(self.local).write_bytes(bytes(np.arange(sum(LENGTHS)) % 3 > 0))
        sums = checksums.BlockSums()
        sums.add(bin_path(self.local).read_bytes())
        sums_path(self.local).write_bytes(sums.to_bytes())
        self.files = fsspec.filesystem("memory")
        self.name = f"/{folder.name}/web"
        for file in folder.glob("web*"):
            self.files.pipe_file(f"/{folder.name}/{file.name}", file.read_bytes())
        self.requests: Counter[tuple[str, int]] = Counter()
        self.reply: Callable[[bytes], bytes] = lambda data: data

    def read(self, files: object, name: str, *, start: int, end: int) -> bytes:
        self.requests[name.rpartition("/")[2], start] += 1
        return self.reply(READ(files, name, start=start, end=end))

    def config(self, *, is_remote: bool = True, gib: float = 1.0, **options: object) -> DataConfig:
        prefix = f"memory:/{self.name}" if is_remote else str(self.local)
        place = {"object_storage_cache_path": str(self.cache), "object_storage_cache_gib": gib}
        return DataConfig(train_data_path=[prefix], seq_length=16, **place, **options)

    def corpus(self, max_bytes: int = 1 << 30) -> IndexedTokens:
        return IndexedTokens(Address(f"memory:/{self.name}"), ChunkCache(self.cache, max_bytes))


READ = MemoryFileSystem.cat_file


def list_memory(client: Any, folder: Folder, *, token: str | None) -> Page:
    objects = client.find(f"{folder.bucket}/{folder.prefix}", detail=True)
    return Page(objects, len(objects), None)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    for module in (checksums, remote):
        monkeypatch.setattr(module, "BLOCK_BYTES", CHUNK)
    monkeypatch.setattr(storage, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setitem(storage.SCHEMES, "memory", storage._Provider("fsspec", {}, lambda part: {}))
    monkeypatch.setitem(LISTINGS, "memory", list_memory)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # of the default cache
    store = Store(tmp_path, tmp_path / "cache")
    monkeypatch.setattr(
        MemoryFileSystem, "cat_file", lambda *args, **range: store.read(*args, **range)
    )
    return store


def samples(config: DataConfig) -> list[list[list[float]]]:
    train = build_data(config, vocab_size=100, seed=5, required=("train",)).train
    assert train is not None
    read = (train[index] for index in range(train.samples_per_epoch))
    return [[each.tokens.tolist(), each.labels.tolist(), each.loss_mask.tolist()] for each in read]


def chunks(store: Store) -> list[Path]:
    return [path for path in store.cache.glob("objects/*/*") if path.name.isdigit()]


def test_samples_are_those_of_the_files_and_a_chunk_is_requested_once_per_host(
    store: Store,
) -> None:
    expected = samples(store.config(is_remote=False))
    with ThreadPoolExecutor(6) as ranks:  # each opens the corpus by itself
        for read in ranks.map(samples, [store.config()] * 6):
            assert read == expected
    num_chunks = sum(
        -(-file.stat().st_size // CHUNK) for file in (bin_path(store.local), mask_path(store.local))
    )
    assert len(chunks(store)) == num_chunks
    assert set(store.requests.values()) == {1} and len(store.requests) == num_chunks + 2, (
        "index and checksums"
    )
    store.requests.clear()
    assert samples(store.config()) == expected and not store.requests, (
        "another start of the same host"
    )
    local, far = (
        build_data(store.config(is_remote=far), vocab_size=100, seed=5, required=("train",)).train
        for far in (False, True)
    )
    assert list(fingerprints(local).values()) == list(fingerprints(far).values())
    assert list(fingerprints(far)) == [f"memory:/{store.name}"]


def test_opening_takes_as_many_requests_for_any_size(store: Store) -> None:
    corpus = store.corpus()
    assert len(store.requests) == 2 + 3, (
        "index, checksums, and the three blocks that are checked on opening"
    )
    assert corpus.num_tokens == sum(LENGTHS)


def test_the_cache_is_bounded_and_keeps_what_was_used_last(store: Store) -> None:
    corpus, most = store.corpus(max_bytes=10 * CHUNK), 0
    expected = np.concatenate(random_documents(LENGTHS)).tolist()
    for start in np.random.default_rng(0).integers(0, len(expected) - 40, 300).tolist():
        assert corpus.read(start, start + 40).tolist() == expected[start : start + 40]
        assert corpus.read(0, 8).tolist() == expected[:8]
        most = max(most, len(chunks(store)))
    assert 8 <= most <= 10
    assert store.requests["web.bin", 0] == 1, "it was always among the last"
    (store.cache / "used").write_bytes(b"")  # of a process that was killed as it wrote
    corpus.read(1000, 2000)
    assert len(chunks(store)) <= 10


def test_what_a_killed_process_or_a_power_failure_leaves_is_never_read(store: Store) -> None:
    samples(store.config())
    torn, empty, *others = sorted(chunks(store))
    empty.write_bytes(b"")
    for path in (torn, *others):
        path.write_bytes(path.read_bytes()[:10])
    left, young = torn.with_name(".7.0123abcd"), torn.with_name(".8.0123abcd")
    for path in (left, young):
        path.write_bytes(b"half")
    os.utime(left, (time.time() - 4000,) * 2)
    assert samples(store.config()) == samples(store.config(is_remote=False))
    for path in chunks(store):
        path.unlink()
    store.corpus(max_bytes=CHUNK).read(0, sum(LENGTHS))
    assert not left.exists() and young.exists(), "another process may be writing the young one"


@pytest.mark.parametrize("place", ["write_bytes", "rename", "pwrite"])
def test_a_process_killed_while_it_writes_a_chunk_costs_this_chunk(
    store: Store, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, calls = samples(store.config(is_remote=False)), Counter[str]()
    module = os if place == "pwrite" else Path
    do = getattr(module, place)

    def killed(*args: object) -> object:
        calls[place] += 1
        if calls[place] % 3 == 0:
            raise KeyboardInterrupt
        return do(*args)

    monkeypatch.setattr(module, place, killed)
    for _ in range(100):
        try:
            assert samples(store.config(gib=12 * CHUNK / 2**30)) == expected
            break
        except KeyboardInterrupt:
            assert len(chunks(store)) <= 13
    assert calls[place] > 20


def test_a_damaged_chunk_is_fetched_again_and_a_damaged_object_is_an_error(store: Store) -> None:
    expected = samples(store.config(is_remote=False))
    samples(store.config())
    for path in chunks(store):
        path.write_bytes(bytes(path.stat().st_size))
    mask = open_file(Address(f"memory:/{store.name}.mask"), ChunkCache(store.cache, 1 << 30))
    for path in mask.folder.glob("*"):  # it has no checksums
        path.unlink()
    assert samples(store.config()) == expected
    content = bytearray(bin_path(store.local).read_bytes())
    content[5 * CHUNK + 3] ^= 1
    store.files.pipe_file(f"{store.name}.bin", bytes(content))
    with pytest.raises(
        DataError, match=rf"memory:/{store.name}.bin is not as it was written.*from byte 1,280 on"
    ):
        samples(store.config())


def test_requests_that_fail_or_are_cut_off_are_tried_again_then_one_error_names_the_object(
    store: Store,
) -> None:
    expected, number = samples(store.config(is_remote=False)), 0

    def sometimes(data: bytes) -> bytes:
        nonlocal number
        number += 1
        if number % 3 == 1:
            raise OSError("connection reset")
        return data[:-1] if number % 3 == 2 else data

    store.reply = sometimes
    assert samples(store.config()) == expected

    def never(data: bytes) -> bytes:
        raise OSError("service unavailable")

    store.reply, corpus = never, store.corpus()
    for path in chunks(store):
        path.unlink()
    with pytest.raises(
        EnvironmentFault, match=r"web.bin cannot be read: service unavailable; .*--data-path"
    ):
        corpus.read(0, 1500)
    store.reply = lambda data: data[1:]
    with pytest.raises(EnvironmentFault, match="255 of 256 bytes arrived"):
        corpus.read(0, 1500)


def test_an_object_that_was_replaced_is_read_anew(store: Store) -> None:
    before = samples(store.config(fim_data=False))
    documents = random_documents(LENGTHS, seed=9)
    write_documents(store.local, documents)
    store.files.pipe_file(f"{store.name}.bin", bin_path(store.local).read_bytes())
    for path in (sums_path(store.local), mask_path(store.local)):
        path.unlink(missing_ok=True)
        store.files.rm_file(f"/{store.local.parent.name}/{path.name}")
    after = samples(store.config())
    assert after == samples(store.config(is_remote=False)) != before


def test_samples_of_the_next_steps_are_read_ahead_in_their_order(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_THREADS_AHEAD", 1)
    train = build_data(store.config(), vocab_size=100, seed=5, required=("train",)).train
    assert train is not None
    sampler = SamplerConfig(dp_rank=1, dp_size=2, micro_batch_size=2, global_batch_size=12)
    order = []
    monkeypatch.setattr(type(train), "window", lambda self, index: order.append(index) or index)
    batches = GlobalBatchLoader(train, sampler=sampler, consumed_samples=24, skipped_samples=1)
    next(batches)
    wanted = [n + 1 for n in range(24, 60) if n % 4 in (2, 3)]
    deadline = time.monotonic() + 20
    while len(set(order)) < len(wanted) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(set(order)) == wanted
    assert any("_read_all" in thread.name for thread in threading.enumerate())
    batches.close()
    del batches
    while (
        any("_read_all" in thread.name for thread in threading.enumerate())
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    assert not any("_read_all" in thread.name for thread in threading.enumerate()), (
        "they end with the loader"
    )
    unread = GlobalBatchLoader(
        train, sampler=replace(sampler, unread_length=16), consumed_samples=24
    )
    order.clear()
    next(unread)
    assert not order


def test_a_full_validation_reads_ahead(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_THREADS_AHEAD", 1)
    train = build_data(store.config(), vocab_size=100, seed=5, required=("train",)).train
    assert train is not None
    whole = WholeSplit.of(train)
    assert fingerprints(whole) == fingerprints(train)
    read: set[int] = set()
    monkeypatch.setattr(type(train), "window", lambda self, index: read.add(index) or index)
    sampler = SamplerConfig(dp_rank=0, dp_size=1, micro_batch_size=2, global_batch_size=4)
    batches = GlobalBatchLoader(whole, sampler=sampler)
    next(batches)
    deadline = time.monotonic() + 20
    while not read >= set(range(8)) and time.monotonic() < deadline:
        time.sleep(0.01)
    batches.close()
    assert read >= set(range(8)), "samples of the next global batch too"


def test_a_missing_object_and_the_tokenizer_beside_the_tokens(store: Store) -> None:
    with pytest.raises(DataError, match=rf"memory:/{store.name}.mask.idx does not exist"):
        samples(replace(store.config(), train_data_path=[f"memory:/{store.name}.mask"]))
    assert tokenizer_of(store.config()) is None
    store.files.pipe_file(f"{store.name}.nanotrain.json", b'{"tokenizer": "web.tokenizer"}')
    ByteTokenizer().as_fast().save(store.local.with_name("tokenizer"))
    for file in store.local.with_name("tokenizer").iterdir():
        store.files.pipe_file(f"{store.name}.tokenizer/{file.name}", file.read_bytes())
    for _ in range(2):
        assert load_tokenizer(str(tokenizer_of(store.config()))).encode(
            "hé"
        ) == ByteTokenizer().encode("hé")


def test_an_unknown_scheme_and_a_missing_package_are_one_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match=r"ftp://host/web.idx cannot be reached: known are s3://"):
        open_file(Address("ftp://host/web.idx"))
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigError, match=r"gs://b/web.idx needs gcsfs.*pip install"):
        open_file(Address("gs://b/web.idx"))


def test_any_range_of_a_file_is_read_from_both_places(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges at random, at the borders of chunks, empty ones, and ones that end past the file."""
    monkeypatch.setattr(remote, "_REQUEST_BYTES", 300)
    data = bin_path(store.local).read_bytes()
    cache = ChunkCache(store.cache, 1 << 30)
    cache.make()
    files = [
        require_file(bin_path(store.local)),
        require_file(Address(f"memory:/{store.name}.bin"), cache),
    ]
    draw = np.random.default_rng(0)
    borders = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, len(data) - 1, len(data), len(data) + 9]
    edges = [*borders, *draw.integers(0, len(data), 12).tolist()]
    for file in files:
        assert file.size == len(data) and file.local.read_bytes() == data
        for start in edges:
            for stop in edges:
                if start <= stop:
                    assert file.read(start, stop) == data[start:stop], (file, start, stop)
