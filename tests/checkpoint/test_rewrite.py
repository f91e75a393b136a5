"""Averages hold the values of a direct computation, in bounded memory, and refuse other models."""

from pathlib import Path

import pytest
import torch

from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.checkpoint.read import read_global_tensors
from nanotrain.checkpoint.report import verify
from nanotrain.checkpoint.rewrite import average
from nanotrain.comm.group import Group
from nanotrain.errors import CheckpointError
from nanotrain.spec.boxes import TensorBox


def save(folder: Path, step: int, *, rows: int = 6) -> Path:
    draw = torch.Generator().manual_seed(step)
    tensors = {
        TensorBox.full("model/a", (rows, 4)): torch.randn(rows, 4, generator=draw),
        TensorBox.full("model/steps", (2,)): torch.tensor([step, 1]),
        TensorBox.full("router/expert_bias", (3,)): torch.full((3,), float(step)),
        TensorBox.full("optimizer/exp_avg/a", (rows, 4)): torch.randn(rows, 4, generator=draw),
    }
    writer = Checkpointer(folder / "checkpoints", group=Group.single_rank("world"))
    return writer.save(step, tensors, objects={"step": step}, config={}, topology={})


@pytest.mark.parametrize("decay", [None, 0.5])
def test_the_average_is_that_of_a_direct_computation_and_sound(
    tmp_path: Path, decay: float | None
) -> None:
    paths = [save(tmp_path, step) for step in (1, 2, 3)]
    weights = [1.0, 1.0, 1.0] if decay is None else [0.25, 0.5, 1.0]
    values = [dict(read_global_tensors(path, ["model/a"]))["model/a"].double() for path in paths]
    expected = sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(
        weights
    )

    output = average(paths, tmp_path / "averaged", decay=decay)

    result = dict(read_global_tensors(output, ["model/a", "model/steps", "router/expert_bias"]))
    torch.testing.assert_close(result["model/a"], expected.float(), rtol=2e-7, atol=1e-8)
    assert result["router/expert_bias"].tolist() == pytest.approx(
        [2.0 if decay is None else 17 / 7] * 3
    )
    assert result["model/steps"].tolist() == [3, 1], "whole numbers are those of the last"
    assert verify(output).is_sound and verify(output).num_chunks >= 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["averaged", "checkpoints"]


def test_checkpoints_of_another_model_and_existing_folders_are_refused(tmp_path: Path) -> None:
    paths = [save(tmp_path, 1), save(tmp_path, 2, rows=7)]
    with pytest.raises(CheckpointError, match=r"model/a is fp32 \[6, 4\] in .* and fp32 \[7, 4\]"):
        average(paths, tmp_path / "averaged")
    with pytest.raises(
        CheckpointError, match="checkpoints is not empty: it contains step-00000001"
    ):
        average(paths[:1], tmp_path / "checkpoints")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
