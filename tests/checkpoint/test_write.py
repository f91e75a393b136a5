"""Shard files: safetensors with aligned bytes, one entry per chunk, checksums of the bytes on disk."""

import os
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nanotrain.checkpoint import plan
from nanotrain.checkpoint.manifest import Manifest
from nanotrain.checkpoint.write import crc32, plan_writes, write_shard
from nanotrain.precision.dtypes import TORCH_DTYPES
from nanotrain.spec.boxes import Box, TensorBox

MANIFEST = Manifest(3, {}, {}, objects={}, config={}, topology={})


def test_any_dtype_and_strides_are_written_as_safetensors_reads_them(tmp_path: Path) -> None:
    tensors = {
        TensorBox.full(f"model/{name}", (3, 2)): torch.arange(6).reshape(2, 3).t().to(dtype)
        for name, dtype in TORCH_DTYPES.items()
    }
    shard = write_shard(tmp_path / "a.safetensors", tensors, manifest=MANIFEST)

    assert shard.files["a.safetensors"] == (tmp_path / "a.safetensors").stat().st_size
    loaded = load_file(tmp_path / "a.safetensors")
    for box, tensor in tensors.items():
        (chunk,) = shard.tensors[box.name].chunks
        assert torch.equal(loaded[chunk.key], tensor) and loaded[chunk.key].dtype == tensor.dtype
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert (chunk.crc32, chunk.nbytes) == (f"{zlib.crc32(data):08x}", len(data))


def test_the_checksum_covers_all_bytes_of_a_large_chunk(tmp_path: Path) -> None:
    tensor = torch.arange(100_000)
    shard = write_shard(
        tmp_path / "a.safetensors",
        {TensorBox.full("model/a", (100_000,)): tensor},
        manifest=MANIFEST,
    )

    (chunk,) = shard.tensors["model/a"].chunks
    assert chunk.crc32 == f"{zlib.crc32(tensor.numpy().tobytes()):08x}"


def test_the_bytes_begin_at_a_multiple_of_eight_after_a_header_of_any_length(
    tmp_path: Path,
) -> None:
    for length in range(1, 9):
        path = tmp_path / f"{length}.safetensors"
        write_shard(
            path, {TensorBox.full("model/" + "a" * length, (1,)): torch.ones(1)}, manifest=MANIFEST
        )
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


def test_a_write_that_stops_short_goes_on_and_the_whole_file_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, synced = os.pwrite, []
    monkeypatch.setattr(os, "pwrite", lambda handle, data, offset: write(handle, data[:50], offset))
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_size))
    tensor = torch.arange(40)

    shard = write_shard(
        tmp_path / "a.safetensors", {TensorBox.full("model/a", (40,)): tensor}, manifest=MANIFEST
    )

    assert synced == [shard.files["a.safetensors"]]
    assert torch.equal(load_file(tmp_path / "a.safetensors")["model/a@0:40"], tensor)


def test_large_boxes_are_split_and_keys_name_global_coordinates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan.split_box, "__kwdefaults__", {"limit": 16})
    box = TensorBox("model/a", (8, 4), Box((4, 2), (8, 4)))

    writes = plan_writes({box: torch.zeros(4, 2)})

    assert [(write.key, write.offset, write.nbytes) for write in writes] == [
        ("model/a@4:6,2:4", 0, 16),
        ("model/a@6:8,2:4", 16, 16),
    ]


def test_a_rank_without_elements_makes_no_file_and_lists_its_tensors(tmp_path: Path) -> None:
    shard = write_shard(
        tmp_path / "a.safetensors",
        {TensorBox.full("model/empty", (0, 4)): torch.empty(0, 4)},
        manifest=MANIFEST,
    )

    assert not shard.files and not list(tmp_path.iterdir())
    assert (
        shard.tensors["model/empty"].shape == (0, 4) and shard.tensors["model/empty"].chunks == ()
    )


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"x")

    with pytest.raises(FileExistsError):
        write_shard(
            tmp_path / "a.safetensors",
            {TensorBox.full("model/a", (1,)): torch.ones(1)},
            manifest=MANIFEST,
        )


def test_the_checksum_is_zlibs():
    for size in (0, 1, 1000, 100_000):
        data = os.urandom(size)
        assert crc32(memoryview(data)) == zlib.crc32(data)


def test_isal_computes_it_where_it_is_installed():
    isal_zlib = pytest.importorskip("isal.isal_zlib")
    assert crc32 is isal_zlib.crc32
