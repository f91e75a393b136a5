"""Saving and restoring on one rank: values, refusals, and what a failed save leaves behind."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from nanotrain.checkpoint import checkpointer as checkpointer_module
from nanotrain.checkpoint import store
from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.checkpoint.write import write_shard
from nanotrain.comm.group import Group
from nanotrain.errors import CheckpointError, EnvironmentFault
from nanotrain.spec.boxes import Box, TensorBox

WEIGHT, MOMENT = "model/mlp.up.weight", "optimizer/exp_avg/mlp.up.weight"
CONFIG = {"model": {"hidden_size": 6, "num_layers": 1}}


def full(name: str, *shape: int) -> TensorBox:
    return TensorBox.full(name, shape)


def state(seed: int = 0) -> dict[TensorBox, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {full(name, 8, 6): torch.randn(8, 6, generator=draw) for name in (WEIGHT, MOMENT)}


def empty() -> dict[TensorBox, torch.Tensor]:
    return {box: torch.full_like(tensor, torch.nan) for box, tensor in state().items()}


def checkpointer(folder: Path, **options: Any) -> Checkpointer:
    return Checkpointer(folder / "checkpoints", group=Group.single_rank("world"), **options)


def save(folder: Path, step: int, **options: int) -> Path:
    return checkpointer(folder, **options).save(
        step, state(step), objects={"step": step}, config=CONFIG, topology={"dp": 1}
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_restore_returns_what_was_saved_bit_for_bit(tmp_path: Path) -> None:
    path = save(tmp_path, 100)
    targets = empty()

    manifest = checkpointer(tmp_path).restore(path, targets)

    assert path.name == "step-00000100"
    assert sorted(os.listdir(path)) == ["manifest.json", "shard-00000-of-00001.safetensors"]
    assert (manifest.step, manifest.objects, manifest.config) == (100, {"step": 100}, CONFIG)
    assert all(torch.equal(targets[box], tensor) for box, tensor in state(100).items())


def test_targets_are_filled_in_place_even_strided_views(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    buffer = torch.zeros(6, 8)
    targets = {full(WEIGHT, 8, 6): buffer.t()}

    checkpointer(tmp_path).restore(path, targets)

    assert torch.equal(buffer, state(1)[full(WEIGHT, 8, 6)].t())


def test_scalars_and_empty_tensors_and_every_dtype_come_back(tmp_path: Path) -> None:
    dtypes = (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)
    saved = {
        full(f"model/{dtype}".replace("torch.", ""), 3): torch.tensor([0, 1, 1]).to(dtype)
        for dtype in dtypes
    }
    saved |= {
        full("model/scalar"): torch.tensor(1.5),
        full("model/nothing", 0, 4): torch.empty(0, 4),
    }
    path = checkpointer(tmp_path).save(1, saved, objects={}, config={}, topology={})
    targets = {box: torch.zeros_like(tensor) for box, tensor in saved.items()}

    checkpointer(tmp_path).restore(path, targets)

    assert all(torch.equal(targets[box], tensor) for box, tensor in saved.items())


def test_float_tensors_are_cast_on_loading_moments_included(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    weight = torch.zeros(8, 6, dtype=torch.bfloat16)
    moment = torch.zeros(8, 6, dtype=torch.bfloat16)

    checkpointer(tmp_path).restore(path, {full(WEIGHT, 8, 6): weight})

    assert torch.equal(weight, state(1)[full(WEIGHT, 8, 6)].to(torch.bfloat16))
    checkpointer(tmp_path).restore(path, {full(MOMENT, 8, 6): moment})
    assert torch.equal(moment, state(1)[full(MOMENT, 8, 6)].to(torch.bfloat16))
    with pytest.raises(CheckpointError, match="exp_avg/mlp.up.weight is fp32 there, int8 here"):
        checkpointer(tmp_path).restore(path, {full(MOMENT, 8, 6): moment.to(torch.int8)})


def test_a_checkpoint_of_another_model_names_both_shapes_and_the_options_that_differ(
    tmp_path: Path,
) -> None:
    path = save(tmp_path, 7)
    targets = {full(WEIGHT, 8, 5): torch.zeros(8, 5), full("model/extra", 2): torch.zeros(2)}

    with pytest.raises(CheckpointError) as caught:
        checkpointer(tmp_path).restore(
            path, targets, config={"model": {"hidden_size": 5, "num_layers": 1}}
        )

    text = str(caught.value)
    assert "model/mlp.up.weight is [8, 6] there, [8, 5] here" in text
    assert "model/extra is missing there" in text
    assert "model.hidden_size 6 there, 5 here" in text
    assert "num_layers" not in text


def test_a_larger_models_checkpoint_is_not_loaded_in_part(tmp_path: Path) -> None:
    saved = state() | {full("model/layers.1.weight", 2): torch.ones(2)}
    path = checkpointer(tmp_path).save(1, saved, objects={}, config=CONFIG, topology={})

    with pytest.raises(
        CheckpointError,
        match=r"1 tensor differs: model/layers.1.weight is \[2\] there, missing here",
    ):
        checkpointer(tmp_path).restore(path, empty())


def test_boxes_that_leave_a_hole_are_refused_and_nothing_is_committed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    half = {TensorBox(WEIGHT, (8, 6), Box((0, 0), (4, 6))): torch.zeros(4, 6)}

    with pytest.raises(CheckpointError, match=r"\[4:8,0:6\] is written by no rank"):
        checkpointer(tmp_path).save(2, half, objects={}, config={}, topology={})

    assert names(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize("keep_last, kept", [(0, [1, 2, 3, 4]), (1, [4]), (3, [2, 3, 4])])
def test_the_oldest_are_deleted(tmp_path: Path, keep_last: int, kept: list[int]) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep_last=keep_last)

    assert names(tmp_path) == [f"step-{step:08d}" for step in kept]


def test_the_one_just_written_is_kept_even_with_newer_steps_present(tmp_path: Path) -> None:
    for step in (10, 20, 5):
        save(tmp_path, step, keep_last=2)

    assert names(tmp_path) == ["step-00000005", "step-00000020"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 3)
    path = checkpointer(tmp_path).save(3, state(99), objects={}, config=CONFIG, topology={})
    targets = empty()

    checkpointer(tmp_path).restore(path, targets)

    assert all(torch.equal(targets[box], tensor) for box, tensor in state(99).items())
    assert names(tmp_path) == ["step-00000003"]


@pytest.mark.parametrize("call", ["fsync", "pwrite", "rename", "mkdir"])
def test_a_full_disk_is_an_environment_fault_and_leaves_older_checkpoints_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    older = save(tmp_path, 1)

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(EnvironmentFault, match="No space left on device"):
            save(tmp_path, 2)

    assert names(tmp_path) == ["step-00000001"]
    store.require_complete(older)
    assert save(tmp_path, 2).name == "step-00000002"


def test_a_run_folder_that_cannot_be_written_is_an_environment_fault(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where a folder should be")

    with pytest.raises(EnvironmentFault, match="choose another folder with --run-dir"):
        save(tmp_path, 1)


def test_latest_returns_the_newest_complete_one(tmp_path: Path) -> None:
    assert checkpointer(tmp_path).latest() is None
    save(tmp_path, 1)
    path = save(tmp_path, 2)

    assert checkpointer(tmp_path).latest() == path


def test_a_save_in_the_background_holds_what_the_tensors_were_when_it_started(
    tmp_path: Path,
) -> None:
    writer, tensors, targets = checkpointer(tmp_path), state(4), empty()
    strided = {full("model/strided", 6, 8): torch.arange(48.0).view(8, 6).t()}
    tensors |= strided
    targets |= {box: torch.zeros_like(tensor) for box, tensor in strided.items()}
    expected = {box: tensor.clone() for box, tensor in tensors.items()}
    objects = {"step": [4]}
    writer.start_save(4, tensors, objects=objects, config=CONFIG, topology={})
    for tensor in tensors.values():
        tensor.fill_(0.0)
    objects["step"].append(5)

    path = writer.wait()

    assert path is not None and writer.restore(path, targets).objects == {"step": [4]}
    assert all(torch.equal(targets[box], tensor) for box, tensor in expected.items())
    assert sorted(os.listdir(path)) == ["manifest.json", "shard-00000-of-00001.safetensors"]
    assert writer.wait() is None and writer.take_stall_s() > 0 and writer.take_stall_s() == 0.0


def test_polling_never_waits_for_the_save_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, waits = threading.Event(), []

    def write(*args: Any, **options: Any) -> Any:
        waits.append(may_write.wait(10))
        return write_shard(*args, **options)

    monkeypatch.setattr(checkpointer_module, "write_shard", write)
    writer = checkpointer(tmp_path)
    assert writer.poll() is None
    writer.start_save(4, state(4), objects={}, config=CONFIG, topology={})
    assert writer.poll() is None and not waits, "the thread waits, the caller does not"
    may_write.set()
    path = writer.wait()
    assert path is not None and writer.poll() is None and waits == [True]
    writer.start_save(8, state(8), objects={}, config=CONFIG, topology={})
    assert writer.give_up(60) and writer.poll() == path.with_name("step-00000008")


def test_the_next_save_waits_for_the_one_in_flight_and_raises_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, options = checkpointer(tmp_path), {"objects": {}, "config": {}, "topology": {}}
    writer.start_save(1, state(1), **options)
    writer.start_save(2, state(2), **options)
    assert store.complete_checkpoints(tmp_path / "checkpoints")[0].name == "step-00000001"
    writer.wait()
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "pwrite", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full"))
        )
        writer.start_save(3, state(3), **options)
        with pytest.raises(EnvironmentFault, match="full"):
            writer.start_save(4, state(4), **options)
    assert writer.num_failed == 1 and names(tmp_path) == ["step-00000001", "step-00000002"]
    writer.start_save(4, state(4), **options)
    assert writer.give_up(30.0) and names(tmp_path)[-1] == "step-00000004"


def test_the_same_checkpointer_in_another_folder_keeps_its_settings(tmp_path: Path) -> None:
    writer = checkpointer(tmp_path, keep_last=1, keep_every=2, timeout_s=7).in_folder(
        tmp_path / "other"
    )
    for step in (1, 2, 3, 4):
        writer.save(step, state(step), objects={}, config={}, topology={})
    assert sorted(path.name[-1] for path in (tmp_path / "other").iterdir()) == ["2", "4"]
    assert writer.timeout_s == 7
