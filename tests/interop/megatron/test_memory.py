"""An import holds a few chunks, whatever the size of the tensors there."""

from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanotrain.checkpoint import write
from nanotrain.checkpoint.plan import split_box
from nanotrain.checkpoint.read import read_global_tensors
from nanotrain.checkpoint.store import read_manifest
from nanotrain.interop.dcp.tensors import TorchDistFolder
from nanotrain.interop.megatron.export_run import export_megatron
from nanotrain.interop.megatron.import_run import import_megatron
from nanotrain.spec.boxes import Box
from tests.interop.megatron.models import LLAMA, write_checkpoint
from tests.interop.megatron.test_hostile import ARGUMENTS, write_common

CHUNK_BYTES = 512


def test_no_read_is_larger_than_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = write_checkpoint(tmp_path / "run", LLAMA)
    export_megatron(tmp_path / "run", tmp_path / "megatron")
    step = tmp_path / "megatron" / "iter_0000003"
    write_common(step, args=Namespace(**ARGUMENTS))
    read, sizes = TorchDistFolder.read, []

    def counted(folder: TorchDistFolder, key: str, box: Box) -> Tensor:
        values = read(folder, key, box)
        sizes.append(values.nbytes)
        return values

    monkeypatch.setattr(TorchDistFolder, "read", counted)
    monkeypatch.setattr(write, "split_box", partial(split_box, limit=CHUNK_BYTES))
    import_megatron(tmp_path / "megatron", tmp_path / "ours")
    assert max(sizes) <= CHUNK_BYTES
    assert sum(sizes) == sum(value.nbytes for value in ours.values())  # each is read once
    names = list(read_manifest(tmp_path / "ours").tensors)
    for name, value in read_global_tensors(tmp_path / "ours", names):
        assert torch.equal(value, ours[name.removeprefix("model/")]), name
