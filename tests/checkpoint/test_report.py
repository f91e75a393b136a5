"""inspect and verify on sound and on damaged checkpoints; diff names with numbers what differs."""

import math
from pathlib import Path

import pytest
import torch

from nanotrain.checkpoint import plan
from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.checkpoint.report import describe, diff, verify
from nanotrain.comm.group import Group
from nanotrain.spec.boxes import Box, TensorBox
from tests.checkpoint.test_read import write

OBJECTS = {"train": {"consumed_samples": 48, "consumed_tokens": 9000}, "last_step": {"loss": 2.5}}
CONFIG = {"model": {"num_layers": 2, "hidden_size": 8, "vocab_size": 64}}


def save(folder: Path) -> Path:
    tensors = {TensorBox.full(f"model/{name}", (64, 8)): torch.ones(64, 8) for name in ("a", "b")}
    tensors[TensorBox.full("optimizer/exp_avg/a", (64, 8))] = torch.zeros(
        64, 8, dtype=torch.bfloat16
    )
    checkpointer = Checkpointer(folder / "checkpoints", group=Group.single_rank("world"))
    return checkpointer.save(
        12, tensors, objects=OBJECTS, config=CONFIG, topology={"dp": 4, "tp": 1}
    )


def test_describe_names_step_layout_kinds_and_tensors_of_the_newest_checkpoint_of_a_run(
    tmp_path: Path,
) -> None:
    save(tmp_path)

    rows = [line.split() for line in describe(tmp_path, tensors=True).splitlines()]

    assert ["files", "1", "shard,", "5.4", "kB"] in rows
    assert ["written", "by", "dp", "4,", "tp", "1"] in rows
    assert [
        "trained",
        "step",
        "12,",
        "9,000",
        "tokens,",
        "48",
        "samples,",
        "loss",
        "2.5000",
    ] in rows
    assert [
        "parameters",
        *["1,024", "elements", "of", "the", "model,", "padding", "included"],
    ] in rows
    assert ["model", "2", "layers,", "hidden", "8,", "4", "heads,", "vocabulary", "64"] in rows
    assert ["model", "2", "1,024", "fp32", "4.1", "kB"] in rows
    assert ["optimizer/exp_avg/a", "64", "x", "8", "bf16", "1", "1.0", "kB"] in rows


def test_a_sound_checkpoint_is_called_sound(tmp_path: Path) -> None:
    report = verify(save(tmp_path))

    assert report.is_sound
    assert (report.num_chunks, report.nbytes) == (3, 2 * 64 * 8 * 4 + 64 * 8 * 2)
    assert "sound" in report.text()


def test_a_flipped_byte_is_reported_with_its_chunk_and_both_checksums(tmp_path: Path) -> None:
    shard = next(save(tmp_path).glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1  # the last byte belongs to the optimizer's tensor
    shard.write_bytes(content)

    report = verify(tmp_path)

    (fault,) = report.faults
    assert "optimizer/exp_avg/a@0:64,0:8" in fault
    assert fault.count("crc32") == 1 and "the manifest has" in fault
    assert fault in report.text()


def test_every_chunk_lost_to_a_truncated_or_missing_file_is_reported(tmp_path: Path) -> None:
    path = save(tmp_path)
    shard = next(path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1500])

    truncated = verify(path)
    shard.unlink()
    missing = verify(path)

    assert [fault.split()[1] for fault in truncated.faults[1:]] == [
        "model/b@0:64,0:8",
        "optimizer/exp_avg/a@0:64,0:8",
    ]
    assert len(missing.faults) == 1 and "3 chunks are lost" in missing.faults[0]


def test_the_layout_names_ranks_and_the_axes_with_more_than_one(tmp_path: Path) -> None:
    topology = {"world_size": 4, "axes": ["tp", "cp", "dp", "pp"], "sizes": [2, 1, 2, 1]}
    checkpointer = Checkpointer(tmp_path / "checkpoints", group=Group.single_rank("world"))
    checkpointer.save(
        1,
        {TensorBox.full("model/a", (2,)): torch.ones(2)},
        objects={},
        config=CONFIG,
        topology=topology,
    )
    assert "written by  4 ranks, tp 2, dp 2" in describe(tmp_path).splitlines()


def saved(
    folder: Path, change: float = 0.0, vocab_size: int | None = None, **tensors: torch.Tensor
) -> Path:
    values = {"a": torch.arange(8.0), "b": torch.ones(3, 2, dtype=torch.bfloat16)} | tensors
    values["a"][3] += change
    writer = Checkpointer(folder, group=Group.single_rank("world"))
    boxes = {
        TensorBox.full(f"model/{name}", tuple(value.shape)): value for name, value in values.items()
    }
    config: dict[str, dict[str, float]] = {"optim": {"lr": 0.1 + change}}
    config |= {"model": {"vocab_size": vocab_size}} if vocab_size else {}
    return writer.save(
        2, boxes, objects={"train": {"step": 2}}, config=config, topology={"dp": folder.name}
    )


def test_equal_checkpoints_are_equal_whatever_their_layout(tmp_path: Path) -> None:
    outcome = diff(saved(tmp_path / "a"), saved(tmp_path / "b"))
    assert (
        outcome.is_equal
        and outcome.num_equal == 2
        and "2 tensors are equal to the bit" in outcome.text()
    )


def test_values_settings_and_shapes_that_differ_are_named_with_numbers(tmp_path: Path) -> None:
    outcome = diff(saved(tmp_path / "a"), saved(tmp_path / "b", 0.5, c=torch.zeros(2)))
    (tensor,) = outcome.tensors
    assert (tensor.name, tensor.largest) == ("model/a", 0.5)
    assert math.isclose(tensor.relative, 0.5 / math.sqrt(140), rel_tol=1e-6)
    assert outcome.lines == (
        "model/c: missing in a, fp32 [2] in b",
        "config.optim.lr: 0.1 in a, 0.6 in b",
    )
    assert not outcome.is_equal and "largest difference 0.5" in outcome.text()


def test_a_relative_difference_is_that_of_the_whole_tensor_also_of_its_equal_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan.split_box, "__kwdefaults__", {"limit": 16})  # four elements of eight
    (tensor,) = diff(saved(tmp_path / "a"), saved(tmp_path / "b", 0.5)).tensors
    assert math.isclose(tensor.relative, 0.5 / math.sqrt(140), rel_tol=1e-6)


def test_a_nan_is_a_difference(tmp_path: Path) -> None:
    (tensor,) = diff(saved(tmp_path / "a"), saved(tmp_path / "b", math.nan)).tensors
    assert math.isnan(tensor.largest)


def table(rows: int, padding: float = 0.0) -> dict[str, torch.Tensor]:
    """A table of five tokens."""
    return {
        "embedding.word.weight": torch.cat(
            [torch.arange(10.0).view(5, 2), torch.full((rows - 5, 2), padding)]
        )
    }


def test_of_the_vocabulary_only_the_rows_of_tokens_are_compared(tmp_path: Path) -> None:
    first = saved(tmp_path / "a", vocab_size=5, **table(6))
    for number, other in enumerate((table(6, padding=1.0), table(8), table(5))):
        outcome = diff(first, saved(tmp_path / f"b{number}", vocab_size=5, **other))
        rows = len(other["embedding.word.weight"])
        assert outcome.is_equal and outcome.num_equal == 3
        note = (
            f"of the vocabulary 5 tokens are compared, not their padding (6 rows in a, {rows} in b)"
        )
        assert outcome.padding == note and note in outcome.text()


def test_tokens_that_differ_and_other_vocabularies_are_differences(tmp_path: Path) -> None:
    first, changed = saved(tmp_path / "a", vocab_size=5, **table(6)), table(8)
    changed["embedding.word.weight"][4, 1] += 1.0
    (tensor,) = diff(first, saved(tmp_path / "b", vocab_size=5, **changed)).tensors
    assert (tensor.name, tensor.largest) == ("model/embedding.word.weight", 1.0)
    outcome = diff(first, saved(tmp_path / "c", vocab_size=6, **table(8)))
    assert (
        "model/embedding.word.weight: fp32 [6, 2] in a, fp32 [8, 2] in b" in outcome.lines
        and not outcome.padding
    )
    same_rows = saved(tmp_path / "d", vocab_size=6, **table(6, padding=1.0))
    assert [tensor.name for tensor in diff(first, same_rows).tensors] == [
        "model/embedding.word.weight"
    ]


@pytest.mark.parametrize("more", [-1, 0, 1, 100])
def test_the_chunks_of_all_shards_are_counted_and_their_sizes_compared(
    tmp_path: Path, more: int
) -> None:
    boxes = [TensorBox("model/a", (3, 4), Box((row, 0), (row + 1, 4))) for row in range(3)]
    shares = [
        {boxes[0]: torch.ones(1, 4), boxes[1]: torch.ones(1, 4)},
        {boxes[2]: torch.ones(1, 4)},
    ]
    path = write(tmp_path, 1, shares=shares)
    file = path / "shard-00001-of-00002.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:more] if more < 0 else data + bytes(more))
    report = verify(path)
    assert (report.num_chunks, report.nbytes) == (3, 3 * 4 * 4)
    assert report.is_sound is (more == 0)
    if more:
        sizes = f"has {len(data) + more} bytes, the manifest has {len(data)}"
        assert any(sizes in fault for fault in report.faults)
