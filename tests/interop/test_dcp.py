"""torch.distributed.checkpoint reads what is exported."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.comm.group import Group
from nanotrain.errors import CheckpointError
from nanotrain.interop.dcp import export_dcp
from nanotrain.spec.boxes import TensorBox


def test_torch_reads_the_same_values(tmp_path: Path) -> None:
    values = {"model/a": torch.randn(6, 4), "model/s": torch.tensor(2.5), "optimizer/exp_avg/a": torch.randn(6, 4)}
    values["model/b"] = torch.randn(5).to(torch.bfloat16)
    writer = Checkpointer(tmp_path / "checkpoints", group=Group.single_rank("world"))
    boxes = {TensorBox.full(name, tuple(value.shape)): value for name, value in values.items()}
    writer.save(3, boxes, objects={"train": {"step": 3}}, config={"model": {"num_layers": 2}}, topology={})

    assert "4 tensors of step 3" in export_dcp(tmp_path, tmp_path / "dcp")

    state = {name: torch.zeros_like(value) for name, value in values.items()} | {"objects": None, "config": None}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(state[name], value) for name, value in values.items())
    assert state["objects"] == {"train": {"step": 3}} and state["config"] == {"model": {"num_layers": 2}}
    with pytest.raises(CheckpointError, match="is not empty"):
        export_dcp(tmp_path, tmp_path / "dcp")
