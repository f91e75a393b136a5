"""Through real files: what any ranks wrote in any sharding, any other ranks read in any other, to
the bit.
"""

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from nanotrain.checkpoint import commit, read, store
from nanotrain.checkpoint.manifest import ChunkEntry, Manifest, to_json
from nanotrain.checkpoint.plan import plan_reads
from nanotrain.checkpoint.read import ShardFile, Source, read_chunks, read_global_tensors
from nanotrain.checkpoint.write import file_threads, shard_name, write_shard
from nanotrain.errors import CheckpointError
from nanotrain.precision.dtypes import TORCH_DTYPES
from nanotrain.spec.boxes import Box, TensorBox
from nanotrain.untrusted import parse_json
from tests.checkpoint.test_plan import covers, shapes

Shares = list[dict[TensorBox, torch.Tensor]]


def random_shares(data: st.DataObject, tensors: dict[str, torch.Tensor], *, size: int) -> Shares:
    """Every tensor in random chunks on random ranks; some ranks may get nothing."""
    shares: Shares = [{} for _ in range(size)]
    for name, tensor in tensors.items():
        for box in data.draw(covers(tuple(tensor.shape))):
            owner = data.draw(st.integers(0, size - 1))
            shares[owner][TensorBox(name, tuple(tensor.shape), box)] = tensor[box.slices()]
    return shares


def write(folder: Path, step: int, *, shares: Shares) -> Path:
    """`Checkpointer.save` for many ranks, one after the other."""
    temporary = commit.start_writing(folder, step)
    none = Manifest(step, {}, {}, objects={}, config={}, topology={})
    names = [temporary / shard_name(index, len(shares)) for index in range(len(shares))]
    shards = [
        write_shard(name, share, manifest=none) for name, share in zip(names, shares, strict=True)
    ]
    return commit.commit(folder, step, text=to_json(commit.merge_shards(none, shards)))


@settings(max_examples=40)
@given(st.data())
def test_save_on_t1_load_on_t2_save_gives_the_same_global_tensors(data: st.DataObject) -> None:
    dtypes = data.draw(
        st.lists(st.sampled_from(list(TORCH_DTYPES.values())), min_size=1, max_size=4)
    )
    truth = {
        f"model/{i}": (torch.randn(data.draw(shapes)) * 50).to(dtype)
        for i, dtype in enumerate(dtypes)
    }
    first = random_shares(data, truth, size=data.draw(st.integers(1, 4)))
    second = random_shares(data, truth, size=data.draw(st.integers(1, 4)))

    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), 1, shares=first)
        manifest = store.require_complete(path)
        loaded = [
            {box: torch.zeros_like(tensor) for box, tensor in share.items()} for share in second
        ]
        for share in loaded:
            read_chunks(path, plan_reads(manifest, share), targets=share)
        again = write(Path(folder), 2, shares=loaded)

        for share, expected in zip(loaded, second, strict=True):
            assert all(torch.equal(share[box], tensor) for box, tensor in expected.items())
        for name, tensor in read_global_tensors(again, truth):
            assert tensor.dtype == truth[name].dtype
            assert torch.equal(tensor, truth[name])


def test_a_file_is_opened_once_for_all_its_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = {TensorBox.full(f"model/{i}", (4,)): torch.ones(4) for i in range(9)}
    path = write(tmp_path, 1, shares=[share, {TensorBox.full("model/other", (4,)): torch.ones(4)}])
    manifest = store.read_manifest(path)
    opened: list[str] = []
    monkeypatch.setattr("nanotrain.checkpoint.read.ShardFile.__init__", _counting(opened))

    read_chunks(path, plan_reads(manifest, share), targets=share)

    assert opened == ["shard-00000-of-00002.safetensors"]


def test_a_header_is_read_once_for_all_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = {TensorBox.full(f"model/{i}", (1,)): torch.full((1,), float(i)) for i in range(9)}
    path, read = write(tmp_path, 1, shares=[share]), Mock(side_effect=parse_json)
    monkeypatch.setattr("nanotrain.checkpoint.read.parse_json", read)
    tensors = read_global_tensors(path, [box.name for box in share])
    assert [tensor.item() for _, tensor in tensors] == list(range(9)) and read.call_count == 1


def test_chunks_are_read_in_the_order_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = {TensorBox.full(f"model/{i}", (4,)): torch.full((4,), float(i)) for i in range(9)}
    path = write(tmp_path, 1, shares=[share])
    loaded = {box: torch.zeros(4) for box in reversed(share)}
    offsets: list[int] = []
    real = ShardFile.read

    def noted(self: ShardFile, chunk: ChunkEntry, offset: int, *, into: memoryview) -> None:
        offsets.append(offset)
        real(self, chunk, offset, into=into)

    monkeypatch.setattr(ShardFile, "read", noted)
    monkeypatch.setattr("nanotrain.checkpoint.write.cores_per_rank", lambda: 1)  # no threads

    read_chunks(path, plan_reads(store.read_manifest(path), loaded), targets=loaded)

    assert offsets == sorted(offsets)
    assert len(offsets) == 9
    assert all(torch.equal(loaded[box], tensor) for box, tensor in share.items())


def test_targets_that_overlap_are_all_filled(tmp_path: Path) -> None:
    full, half = (TensorBox("model/a", (4,), Box((start,), (4,))) for start in (0, 2))
    path = write(tmp_path, 1, shares=[{full: torch.arange(4.0)}])
    targets = {full: torch.zeros(4), half: torch.zeros(2)}
    read_chunks(path, plan_reads(store.read_manifest(path), targets), targets=targets)
    assert targets[full].tolist() == [0, 1, 2, 3] and targets[half].tolist() == [2, 3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_chunks_are_cast_to_the_dtype_of_their_target(tmp_path: Path, dtype: torch.dtype) -> None:
    box = TensorBox.full("model/a", (4,))
    path = write(
        tmp_path, 1, shares=[{box: torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.bfloat16)}]
    )
    targets = {box: torch.zeros(4, dtype=dtype)}
    read_chunks(path, plan_reads(store.read_manifest(path), targets), targets=targets)
    assert targets[box].tolist() == [0.5, 1.0, 2.0, 3.0]


def _counting(opened: list[str]) -> Callable[..., None]:
    real = ShardFile.__init__

    def count(self: ShardFile, path: Path, source: Source | None, **options: Any) -> None:
        opened.append(path.name)
        real(self, path, source, **options)

    return count


def test_every_byte_of_a_chunk_read_in_pieces_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanotrain.checkpoint.read._LocalSource.max_bytes", 16)
    share = {TensorBox.full("model/a", (11,)): torch.randn(11)}  # 44 bytes: pieces of 16, 16 and 12
    path = write(tmp_path, 1, shares=[share])
    manifest = store.read_manifest(path)
    file = path / "shard-00000-of-00001.safetensors"
    sound = file.read_bytes()
    loaded = {box: torch.zeros(11) for box in share}

    read_chunks(path, plan_reads(manifest, loaded), targets=loaded)
    assert all(torch.equal(loaded[box], tensor) for box, tensor in share.items())
    for byte in range(-44, 0):
        damaged = bytearray(sound)
        damaged[byte] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(
            CheckpointError, match="chunk model/a@0:11 is damaged: its bytes in .* have crc32"
        ):
            read_chunks(path, plan_reads(manifest, loaded), targets=loaded)


def test_a_file_that_shrinks_while_it_is_read_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanotrain.checkpoint.read._LocalSource.max_bytes", 16)
    share = {TensorBox.full("model/a", (11,)): torch.randn(11)}
    path = write(tmp_path, 1, shares=[share])
    ((chunk,),) = (entry.chunks for entry in store.read_manifest(path).tensors.values())
    with ShardFile(path / chunk.file) as shard:
        offset = shard.offset(chunk, "fp32")
        (path / chunk.file).write_bytes((path / chunk.file).read_bytes()[:-5])

        with pytest.raises(CheckpointError, match="ends 5 bytes too early"):
            shard.read(chunk, offset, into=memoryview(bytearray(44)))


def test_an_unknown_name_is_an_error_with_the_command_that_lists_them(tmp_path: Path) -> None:
    path = write(tmp_path, 1, shares=[{TensorBox.full("model/a", (2,)): torch.ones(2)}])

    with pytest.raises(
        CheckpointError, match="holds no tensor model/b: it holds 1 others, the first is model/a"
    ):
        list(read_global_tensors(path, ["model/b"]))


class _Bytes:
    """An object of a store."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def read(self, start: int, stop: int) -> bytes:
        assert 0 <= start <= stop <= len(self.data), "outside of the object"
        return self.data[start:stop]


@given(st.binary(max_size=40), st.integers(0, 40), st.integers(0, 40))
def test_a_read_of_an_object_gives_all_of_its_bytes_at_once(
    data: bytes, offset: int, length: int
) -> None:
    """A header is one read; it may be longer than what the first request brings."""
    with patch.object(read, "HEAD_BYTES", 8):
        source = read.RemoteSource(_Bytes(data), len(data))  # type: ignore[arg-type]
        into = bytearray(length)
        count = source.read_into(memoryview(into), min(offset, len(data)))
    expected = data[min(offset, len(data)) :][:length]
    assert bytes(into[:count]) == expected


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": "F16"},  # as large
        {"dtype": "F32"},
        {"shape": [3, 2]},
        {"shape": [6]},
        {"data_offsets": [0, 10]},
        {"data_offsets": [0, 14]},
        {"data_offsets": [4, 16]},  # beyond the end
        {"data_offsets": [-4, 8]},
        {"data_offsets": [0]},
        None,
    ],
)
def test_every_entry_of_a_header_is_that_of_the_manifest(
    tmp_path: Path, changed: dict[str, Any] | None
) -> None:
    share = {TensorBox.full("model/a", (2, 3)): torch.ones(2, 3, dtype=torch.bfloat16)}
    path = write(tmp_path, 1, shares=[share])
    ((chunk,),) = (entry.chunks for entry in store.read_manifest(path).tensors.values())
    with ShardFile(path / chunk.file) as shard:
        assert shard.offset(chunk, "bf16") == shard._begin
        entry = shard._header.pop(chunk.key)
        if changed is not None:
            shard._header[chunk.key] = entry | changed
        with pytest.raises(CheckpointError, match="is damaged"):
            shard.offset(chunk, "bf16")


def test_threads_are_started_for_several_chunks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanotrain.checkpoint.write.cores_per_rank", lambda: 4)
    for num_calls, in_this_thread in ((1, True), (2, False)):
        with file_threads(num_calls) as start:
            threads = set(start(lambda _: threading.get_ident(), range(num_calls)))
        assert (threads == {threading.get_ident()}) == in_this_thread
