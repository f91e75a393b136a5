"""What export-dcp wrote comes back as it was."""

from pathlib import Path

import pytest
import torch

from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.checkpoint.read import read_global_tensors
from nanotrain.checkpoint.store import read_manifest
from nanotrain.cli.main import main
from nanotrain.comm.group import Group
from nanotrain.spec.boxes import TensorBox

OBJECTS = {"train": {"step": 3, "consumed_samples": 24}, "optimizer": {"num_updates": 3}}


def test_the_same_tensors_counters_and_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {
        "model/layers.0.a": torch.randn(6, 4),
        "model/b": torch.randn(5).bfloat16(),
        "router/layers.0.mlp.router.expert_bias": torch.randn(4),
        "optimizer/exp_avg/layers.0.a": torch.randn(6, 4),
    }
    boxes = {TensorBox.full(name, tuple(value.shape)): value for name, value in values.items()}
    writer = Checkpointer(tmp_path / "checkpoints", group=Group.single_rank("world"))
    ours = writer.save(
        3, boxes, objects=OBJECTS, config={"model": {"num_layers": 2}}, topology={"tp": 1}
    )
    for step in ("export-dcp", "import-dcp"):
        source = ours if step == "export-dcp" else tmp_path / "export-dcp"
        assert main(["checkpoint", step, str(source), str(tmp_path / step)]) == 0
    assert "4 tensors of step 3 as nanotrain wrote them" in capsys.readouterr().out
    back = read_manifest(tmp_path / "import-dcp")
    before = read_manifest(ours)
    assert (back.step, back.objects, back.config) == (3, before.objects, before.config)
    read = dict(read_global_tensors(tmp_path / "import-dcp", list(back.tensors)))
    assert read.keys() == values.keys()
    for name, value in values.items():
        assert read[name].dtype == value.dtype and torch.equal(read[name], value), name
    words = ["checkpoint", "import-dcp", str(tmp_path / "export-dcp"), str(tmp_path / "other")]
    options = ([["--num-layers", "3"], "num_layers"], [["--no-optim"], "--no-optim"])
    for option, name in (*options, [["--model-config", str(tmp_path)], "--model-config"]):
        assert main([*words, *option]) == 2
        error = capsys.readouterr().err
        assert "settings have no effect here" in error and name in error
        assert not (tmp_path / "other").exists()
