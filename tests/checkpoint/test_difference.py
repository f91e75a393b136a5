"""What differs between two checkpoints is listed with numbers; equal ones are equal to the bit."""

import math
from pathlib import Path

import pytest
import torch

from nanotrain.checkpoint import plan
from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.checkpoint.difference import diff
from nanotrain.comm.group import Group
from nanotrain.spec.boxes import TensorBox


def save(folder: Path, change: float = 0.0, vocab_size: int | None = None, **tensors: torch.Tensor) -> Path:
    values = {"a": torch.arange(8.0), "b": torch.ones(3, 2, dtype=torch.bfloat16)} | tensors
    values["a"][3] += change
    writer = Checkpointer(folder, group=Group.single_rank("world"))
    boxes = {TensorBox.full(f"model/{name}", tuple(value.shape)): value for name, value in values.items()}
    config: dict[str, dict[str, float]] = {"optim": {"lr": 0.1 + change}}
    config |= {"model": {"vocab_size": vocab_size}} if vocab_size else {}
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


def test_a_relative_difference_is_that_of_the_whole_tensor_also_of_its_equal_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan.split_box, "__kwdefaults__", {"limit": 16})  # four elements of eight
    (tensor,) = diff(save(tmp_path / "a"), save(tmp_path / "b", 0.5)).tensors
    assert math.isclose(tensor.relative, 0.5 / math.sqrt(140), rel_tol=1e-6)


def test_a_nan_is_a_difference(tmp_path: Path) -> None:
    (tensor,) = diff(save(tmp_path / "a"), save(tmp_path / "b", math.nan)).tensors
    assert math.isnan(tensor.largest)


def table(rows: int, padding: float = 0.0) -> dict[str, torch.Tensor]:
    """A table of five tokens."""
    return {"embedding.word.weight": torch.cat([torch.arange(10.0).view(5, 2), torch.full((rows - 5, 2), padding)])}


def test_of_the_vocabulary_only_the_rows_of_tokens_are_compared(tmp_path: Path) -> None:
    first = save(tmp_path / "a", vocab_size=5, **table(6))
    for number, other in enumerate((table(6, padding=1.0), table(8), table(5))):
        outcome = diff(first, save(tmp_path / f"b{number}", vocab_size=5, **other))
        rows = len(other["embedding.word.weight"])
        assert outcome.is_equal and outcome.num_equal == 3
        note = f"of the vocabulary 5 tokens are compared, not their padding (6 rows in a, {rows} in b)"
        assert outcome.padding == note and note in outcome.text()


def test_tokens_that_differ_and_other_vocabularies_are_differences(tmp_path: Path) -> None:
    first, changed = save(tmp_path / "a", vocab_size=5, **table(6)), table(8)
    changed["embedding.word.weight"][4, 1] += 1.0
    (tensor,) = diff(first, save(tmp_path / "b", vocab_size=5, **changed)).tensors
    assert (tensor.name, tensor.largest) == ("model/embedding.word.weight", 1.0)
    outcome = diff(first, save(tmp_path / "c", vocab_size=6, **table(8)))
    assert "model/embedding.word.weight: fp32 [6, 2] in a, fp32 [8, 2] in b" in outcome.lines and not outcome.padding
    same_rows = save(tmp_path / "d", vocab_size=6, **table(6, padding=1.0))
    assert [tensor.name for tensor in diff(first, same_rows).tensors] == ["model/embedding.word.weight"]
