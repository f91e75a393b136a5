"""inspect and verify on sound and on damaged checkpoints."""

from pathlib import Path

import torch

from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.checkpoint.report import describe, verify
from nanotrain.comm.group import Group
from nanotrain.spec.boxes import TensorBox

OBJECTS = {"train": {"consumed_samples": 48, "consumed_tokens": 9000}, "last_step": {"loss": 2.5}}
CONFIG = {"model": {"num_layers": 2, "hidden_size": 8, "vocab_size": 64}}


def save(folder: Path) -> Path:
    tensors = {TensorBox.full(f"model/{name}", (64, 8)): torch.ones(64, 8) for name in ("a", "b")}
    tensors[TensorBox.full("optimizer/exp_avg/a", (64, 8))] = torch.zeros(64, 8, dtype=torch.bfloat16)
    checkpointer = Checkpointer(folder / "checkpoints", group=Group.single_rank("world"))
    return checkpointer.save(12, tensors, objects=OBJECTS, config=CONFIG, topology={"dp": 4, "tp": 1})


def test_describe_names_step_layout_kinds_and_tensors_of_the_newest_checkpoint_of_a_run(tmp_path: Path) -> None:
    save(tmp_path)

    rows = [line.split() for line in describe(tmp_path, tensors=True).splitlines()]

    assert ["files", "1", "shard,", "5.4", "kB"] in rows
    assert ["written", "by", "dp", "4,", "tp", "1"] in rows
    assert ["trained", "step", "12,", "9,000", "tokens,", "48", "samples,", "loss", "2.5000"] in rows
    assert ["parameters", *["1,024", "elements", "of", "the", "model,", "padding", "included"]] in rows
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

    assert [fault.split()[1] for fault in truncated.faults[1:]] == ["model/b@0:64,0:8", "optimizer/exp_avg/a@0:64,0:8"]
    assert len(missing.faults) == 1 and "3 chunks are lost" in missing.faults[0]


def test_the_layout_names_ranks_and_the_axes_with_more_than_one(tmp_path: Path) -> None:
    topology = {"world_size": 4, "axes": ["tp", "cp", "dp", "pp"], "sizes": [2, 1, 2, 1]}
    checkpointer = Checkpointer(tmp_path / "checkpoints", group=Group.single_rank("world"))
    checkpointer.save(1, {TensorBox.full("model/a", (2,)): torch.ones(2)}, objects={}, config=CONFIG, topology=topology)
    assert "written by  4 ranks, tp 2, dp 2" in describe(tmp_path).splitlines()
