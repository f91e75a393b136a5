"""What differs between two checkpoints is listed with numbers; equal ones are equal to the bit."""

import math
from pathlib import Path

import torch

from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.checkpoint.difference import diff
from nanotrain.comm.group import Group
from nanotrain.topology.boxes import TensorBox


def save(folder: Path, change: float = 0.0, **tensors: torch.Tensor) -> Path:
    values = {"a": torch.arange(8.0), "b": torch.ones(3, 2, dtype=torch.bfloat16)} | tensors
    values["a"][3] += change
    writer = Checkpointer(folder, group=Group.single_rank("world"))
    boxes = {TensorBox.full(f"model/{name}", tuple(value.shape)): value for name, value in values.items()}
    config = {"optim": {"lr": 0.1 + change}}
    return writer.save(2, boxes, objects={"train": {"step": 2}}, config=config, topology={"dp": folder.name})


def test_equal_checkpoints_are_equal_whatever_their_layout(tmp_path: Path) -> None:
    outcome = diff(save(tmp_path / "a"), save(tmp_path / "b"))
    assert outcome.is_equal and outcome.num_equal == 2 and "2 tensors are equal to the bit" in outcome.text()


def test_values_settings_and_shapes_that_differ_are_named_with_numbers(tmp_path: Path) -> None:
    outcome = diff(save(tmp_path / "a"), save(tmp_path / "b", 0.5, c=torch.zeros(2)))
    (tensor,) = outcome.tensors
    assert (tensor.name, tensor.largest) == ("model/a", 0.5)
    assert math.isclose(tensor.relative, 0.5 / math.sqrt(140), rel_tol=1e-6)
    assert outcome.lines == ("model/c: missing in a, fp32 [2] in b", "config.optim.lr: 0.1 in a, 0.6 in b")
    assert not outcome.is_equal and "largest difference 0.5" in outcome.text()


def test_a_nan_is_a_difference(tmp_path: Path) -> None:
    (tensor,) = diff(save(tmp_path / "a"), save(tmp_path / "b", math.nan)).tensors
    assert math.isnan(tensor.largest)
