"""torch.distributed.checkpoint reads what is exported."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.checkpoint.export_folder import export_folder
from nanotrain.comm.group import Group
from nanotrain.errors import CheckpointError, EnvironmentFault, NanotrainError
from nanotrain.interop.dcp.export import export_dcp, torch_export
from nanotrain.spec.boxes import TensorBox
from tests.runs.test_metrics_file import file_size_limit


def test_torch_reads_the_same_values(tmp_path: Path) -> None:
    values = {
        "model/a": torch.randn(6, 4),
        "model/s": torch.tensor(2.5),
        "optimizer/exp_avg/a": torch.randn(6, 4),
    }
    values["model/b"] = torch.randn(5).to(torch.bfloat16)
    writer = Checkpointer(tmp_path / "checkpoints", group=Group.single_rank("world"))
    boxes = {TensorBox.full(name, tuple(value.shape)): value for name, value in values.items()}
    writer.save(
        3, boxes, objects={"train": {"step": 3}}, config={"model": {"num_layers": 2}}, topology={}
    )

    assert "4 tensors of step 3" in export_dcp(tmp_path, tmp_path / "dcp")

    state = {name: torch.zeros_like(value) for name, value in values.items()} | {
        "objects": None,
        "config": None,
    }
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(state[name], value) for name, value in values.items())
    assert state["objects"] == {"train": {"step": 3}} and state["config"] == {
        "model": {"num_layers": 2}
    }
    with pytest.raises(CheckpointError, match="is not empty"):
        export_dcp(tmp_path, tmp_path / "dcp")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    boxes = {TensorBox.full("model/w", (64, 64)): torch.ones(64, 64)}
    writer = Checkpointer(tmp_path / "checkpoints", group=Group.single_rank("world"))
    return writer.save(3, boxes, objects={}, config={}, topology={})


def write_archive(folder: Path) -> None:
    (folder / "sub").mkdir()
    torch.save(torch.zeros(4096), folder / "sub" / "common.pt")


@pytest.mark.parametrize("exists", [False, True])
def test_a_full_disk_is_one_error_and_leaves_nothing(
    tmp_path: Path, saved: Path, exists: bool
) -> None:
    output = tmp_path / "out" / "dcp"
    if exists:
        output.mkdir(parents=True)

    def export_archive() -> None:
        with torch_export(output, nbytes=1) as folder:
            write_archive(folder)

    exports: tuple[Callable[[], object], ...] = (lambda: export_dcp(saved, output), export_archive)
    for export in exports:
        with (
            file_size_limit(5000),
            pytest.raises(EnvironmentFault, match="dcp cannot be written.*bytes free"),
        ):
            export()
        assert [path.name for path in (tmp_path / "out").rglob("*")] == (["dcp"] if exists else [])
    with (
        pytest.raises(EnvironmentFault, match="No space left.*bytes free"),
        export_folder(output, nbytes=2**62),
    ):
        pass
    export_archive()
    assert [path.name for path in sorted(output.rglob("*"))] == ["sub", "common.pt"]


def test_a_damaged_chunk_is_named(tmp_path: Path, saved: Path) -> None:
    (shard,) = saved.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match="chunk model/w@0:64,0:64 is damaged"):
        export_dcp(saved, tmp_path / "dcp")
    assert not (tmp_path / "dcp").exists()
    assert json.loads((saved / "manifest.json").read_text())["step"] == 3


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for output in (tmp_path, tmp_path / "notes.txt"):
        with (
            pytest.raises(NanotrainError, match="is not empty|is a file"),
            export_folder(output, nbytes=1),
        ):
            pass
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_files_appear_in_the_order_in_which_they_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = ["__2.distcp", "__0.distcp", "__1.distcp", ".metadata", "tracker.txt"]
    times, renamed = [1, 2, 3, 3, 4], []
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        renamed.append(target.name)
        real(source, target)

    (tmp_path / "out").mkdir()
    with export_folder(tmp_path / "out", nbytes=1) as folder:
        for name, seconds in sorted(zip(order, times, strict=True)):
            (folder / name).write_text("")
            os.utime(folder / name, (seconds, seconds))
        monkeypatch.setattr(os, "rename", rename)
    assert renamed == order
