"""Boxes of a checkpoint that torch.distributed.checkpoint wrote, and of damaged ones."""

import tracemalloc
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from nanotrain.errors import CheckpointError
from nanotrain.interop.dcp.tensors import TorchDistFolder
from nanotrain.spec.boxes import Box

VALUES = {
    "matrix": torch.arange(60.0).reshape(10, 6),
    "half": torch.arange(8).bfloat16(),
    "turned": torch.arange(12.0).reshape(3, 4).t(),
    "scalar": torch.tensor(2.5),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save(dict(VALUES) | {"note": [1, 2]}, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def test_any_box(folder: Path) -> None:
    stored = TorchDistFolder(folder)
    assert stored.tensors["matrix"].shape == (10, 6) and "note" in stored.objects
    for name, value in VALUES.items():
        assert torch.equal(stored.read(name, Box.full(value.shape)), value)
    box = Box((2, 1), (7, 3))
    assert torch.equal(stored.read("matrix", box), VALUES["matrix"][2:7, 1:3])
    assert torch.equal(stored.read("turned", Box((1, 0), (3, 2))), VALUES["turned"][1:3, :2])
    assert stored.read("half", Box((3,), (3,))).shape == (0,)
    assert stored.read_object("note") == [1, 2]


def test_a_box_of_a_large_tensor_takes_its_own_memory(tmp_path: Path) -> None:
    large = torch.zeros(4096, 2048)  # 32 MiB
    large[100] = 1
    dcp.save({"large": large}, checkpoint_id=tmp_path, no_dist=True)
    stored = TorchDistFolder(tmp_path)
    tracemalloc.start()
    values = stored.read("large", Box((100, 0), (164, 2048)))  # 0.5 MiB
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert values.sum() == 2048 and peak < 2 * 2**20


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_missing_or_short_file_is_one_error(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    for kept in (0, len(content) // 3, len(content) - 200):
        (folder / name).write_bytes(content[:kept])
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_all(folder)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        read_all(folder)


def test_any_changed_byte_is_read_or_one_error(folder: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    for name in (".metadata", "__0_0.distcp"):
        content = (folder / name).read_bytes()
        for place in torch.randint(len(content), (60,), generator=generator).tolist():
            changed = bytearray(content)
            changed[place] ^= 0xFF
            (folder / name).write_bytes(changed)
            try:
                read_all(folder)
            except CheckpointError as error:
                assert str(folder) in str(error)
        (folder / name).write_bytes(content)
    read_all(folder)


def read_all(folder: Path) -> None:
    stored = TorchDistFolder(folder)
    for name, tensor in stored.tensors.items():
        if tensor.shape in {value.shape for value in VALUES.values()}:
            stored.read(name, Box.full(tensor.shape))
