"""Only complete checkpoints are chosen, whatever a killed writer or a bad disk left in the folder."""

import json
import logging
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from nanotrain.checkpoint import commit, store
from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.checkpoint.manifest import DamagedCheckpoint, NewerFormat
from nanotrain.checkpoint.read import ShardFile
from nanotrain.comm.group import Group
from nanotrain.errors import CheckpointError
from nanotrain.spec.boxes import TensorBox
from tests.checkpoint.test_manifest import signed
from tests.harness import HANG_S, forkserver

BOX = TensorBox.full("model/weight", (64,))


def checkpointer(folder: Path, keep_last: int = 0) -> Checkpointer:
    return Checkpointer(
        folder / "checkpoints", group=Group.single_rank("world"), keep_last=keep_last
    )


def save(folder: Path, step: int, keep_last: int = 0) -> Path:
    tensors = {BOX: torch.full((64,), float(step))}
    return checkpointer(folder, keep_last).save(step, tensors, objects={}, config={}, topology={})


def value(folder: Path, path: Path) -> float:
    tensor = torch.zeros(64)
    checkpointer(folder).restore(path, {BOX: tensor})
    assert (tensor == tensor[0]).all()
    return float(tensor[0])


def shard(path: Path) -> Path:
    return next(path.glob("*.safetensors"))


def truncate(path: Path) -> None:
    os.truncate(shard(path), 300)


def replace_manifest(path: Path, make: Callable[[Path], object]) -> None:
    file = path / "manifest.json"
    file.rename(path / "m")
    make(file)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated shard": (truncate, "300 of"),
    "missing shard": (lambda path: shard(path).unlink(), "is missing"),
    "missing manifest": (lambda path: (path / "manifest.json").unlink(), "does not exist"),
    "half a manifest": (lambda path: os.truncate(path / "manifest.json", 100), "no JSON"),
    "binary manifest": (
        lambda path: (path / "manifest.json").write_bytes(b"\xff\x00"),
        "cannot be read",
    ),
    "a pipe": (lambda path: replace_manifest(path, os.mkfifo), "it is no regular file"),
    "a huge manifest": (lambda path: os.truncate(path / "manifest.json", 2**40), "are read"),
    "a linked manifest": (
        lambda path: replace_manifest(path, lambda file: file.symlink_to("m")),
        "a symbolic link",
    ),
    "unfinished": (lambda path: path.rename(path.with_suffix(".tmp")) and None, "never finished"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_incomplete_checkpoint_is_skipped_with_one_warning_that_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    older, newer = save(tmp_path, 1), save(tmp_path, 2)
    spoil, reason = DAMAGES[damage]
    spoil(newer)

    with caplog.at_level(logging.WARNING, logger="nanotrain"):
        resumed_from = store.checkpoint_to_resume(tmp_path / "checkpoints")

    assert resumed_from == older
    assert store.complete_checkpoints(tmp_path / "checkpoints") == [older]
    (warning,) = caplog.messages
    assert "step-00000002" in warning and "using step-00000001" in warning
    assert reason in warning or damage == "binary manifest"


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_incomplete_checkpoint_given_by_path_is_an_error(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 1)
    newer = save(tmp_path, 2)
    DAMAGES[damage][0](newer)

    with pytest.raises(CheckpointError):
        store.find_checkpoint(newer)
    # nor is the older one taken in its place where the run folder is named
    if damage != "unfinished":
        with pytest.raises(DamagedCheckpoint, match=f"--load and a step folder of {newer.parent}"):
            store.find_checkpoint(tmp_path)
    if damage == "unfinished":
        with pytest.raises(CheckpointError, match="not a finished checkpoint"):
            store.find_checkpoint(newer.with_suffix(".tmp"))


def test_one_bit_flipped_is_found_and_named_with_both_checksums(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    content = bytearray(shard(path).read_bytes())
    content[-5] ^= 0x10
    shard(path).write_bytes(content)

    with pytest.raises(
        CheckpointError,
        match=r"model/weight@0:64 is damaged.*shard-00000.*crc32 \w{8}, the manifest has \w{8}",
    ):
        value(tmp_path, path)


@pytest.mark.parametrize("place", [0, 12])
def test_a_damaged_shard_header_is_an_error_not_a_crash(tmp_path: Path, place: int) -> None:
    path = save(tmp_path, 1)
    content = bytearray(shard(path).read_bytes())
    content[place : place + 8] = b"\xff" * 8
    shard(path).write_bytes(content)

    with pytest.raises(CheckpointError, match="damaged"):
        value(tmp_path, path)


def test_a_checkpoint_of_a_later_format_is_never_skipped_for_an_older_one(tmp_path: Path) -> None:
    save(tmp_path, 1)
    manifest = save(tmp_path, 2) / "manifest.json"
    manifest.write_text(signed(json.loads(manifest.read_text()) | {"version": 3}))

    for find in (store.find_checkpoint, store.checkpoint_to_resume):
        with pytest.raises(NewerFormat):
            find(tmp_path / "checkpoints")


@pytest.mark.parametrize("damage", ["missing shard", "half a manifest"])
def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew_in_silence(
    tmp_path: Path, damage: str
) -> None:
    for step in (1, 2):
        DAMAGES[damage][0](save(tmp_path, step))

    with pytest.raises(
        DamagedCheckpoint, match=r"step-00000001 \(.*step-00000002 \(.*--no-auto-resume"
    ) as caught:
        store.checkpoint_to_resume(tmp_path / "checkpoints")
    assert DAMAGES[damage][1] in str(caught.value)


def test_a_first_save_that_was_never_finished_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000001.tmp").mkdir(parents=True)

    assert store.checkpoint_to_resume(tmp_path / "checkpoints") is None
    assert store.checkpoint_to_resume(tmp_path / "nowhere") is None


def test_a_checkpoint_in_the_folder_of_another_step_is_damaged(tmp_path: Path) -> None:
    path = save(tmp_path, 8)
    moved = path.rename(path.with_name("step-00000012"))

    with pytest.raises(DamagedCheckpoint, match="step is 8, the folder is named step-00000012"):
        store.require_complete(moved)


@pytest.mark.parametrize("odd", ["a link to the file", "a pipe", "a folder"])
def test_a_shard_that_is_no_file_of_the_folder_is_refused_before_it_is_opened(
    tmp_path: Path, odd: str
) -> None:
    path = save(tmp_path, 1)
    outside = tmp_path / "outside.safetensors"
    file = shard(path)
    file.rename(outside)
    {
        "a link to the file": lambda: file.symlink_to(outside),
        "a pipe": lambda: os.mkfifo(file),
        "a folder": file.mkdir,
    }[odd]()

    with pytest.raises(DamagedCheckpoint, match="is a symbolic link|is no regular file"):
        store.require_complete(path)
    with pytest.raises(DamagedCheckpoint):
        ShardFile(file)


def test_steps_are_ordered_as_numbers_and_foreign_folders_are_left_alone(tmp_path: Path) -> None:
    newest = save(tmp_path, 123_456_789)
    save(tmp_path, 99_999_999)
    foreign = tmp_path / "checkpoints" / "step-best"
    foreign.mkdir()
    (tmp_path / "checkpoints" / "step-00000007.tmp").mkdir()

    save(tmp_path, 8, keep_last=3)

    assert store.find_checkpoint(tmp_path) == newest
    assert foreign.is_dir()
    assert not (tmp_path / "checkpoints" / "step-00000007.tmp").exists()


@pytest.mark.parametrize("place", ["", "runs/tiny", "checkpoints"])
def test_no_complete_checkpoint_is_an_error_that_says_what_to_name(
    tmp_path: Path, place: str
) -> None:
    (tmp_path / "checkpoints").mkdir()

    with pytest.raises(CheckpointError, match="name a run folder"):
        store.find_checkpoint(tmp_path / place)


def save_and_be_killed(folder: Path, how: str, call: str, times: int) -> None:
    """Save step 3 in a process that is killed at a call of `os`, after so many of them."""
    real, left = getattr(os, call), times

    def last(*args: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)

    setattr(os, call, last)
    if how == "save":
        save(folder, 3, keep_last=2)
    else:
        writer = checkpointer(folder, keep_last=2)
        writer.start_save(3, {BOX: torch.full((64,), 3.0)}, objects={}, config={}, topology={})
        writer.wait()


@pytest.mark.parametrize(
    "how, call, times, survives",
    [
        ("save", "pwrite", 1, False),  # in the middle of the shard
        ("save", "fsync", 1, False),  # the shard is there, the manifest is not yet on the disk
        ("save", "rename", 0, False),  # all written, not yet committed
        ("save", "rename", 1, True),  # committed, the oldest not yet deleted
        ("save", "rmdir", 0, True),  # in the middle of the deletion
        ("start_save", "pwrite", 1, False),  # the same in the background
        ("start_save", "replace", 0, False),  # the shard is there, its report is not
        ("start_save", "rename", 0, False),
        ("start_save", "rename", 1, True),
    ],
)
def test_a_kill_at_any_point_leaves_a_complete_checkpoint_and_the_next_save_cleans_up(
    tmp_path: Path, how: str, call: str, times: int, survives: bool
) -> None:
    """Given steps 1 and 2, when the writer of step 3 is killed with SIGKILL, then 2 or 3 is
    complete.
    """
    save(tmp_path, 1)
    save(tmp_path, 2)

    killed = forkserver().Process(target=save_and_be_killed, args=(tmp_path, how, call, times))
    killed.start()
    killed.join(HANG_S)

    assert killed.exitcode == -signal.SIGKILL
    resumed_from = store.checkpoint_to_resume(tmp_path / "checkpoints")
    assert resumed_from is not None
    assert value(tmp_path, resumed_from) == (3.0 if survives else 2.0)
    save(tmp_path, 4, keep_last=2)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == [f"step-{step:08d}" for step in ((3, 4) if survives else (2, 4))]


def test_what_a_rename_relies_on_is_on_the_disk_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, fsync, rename = [], os.fsync, os.rename

    def noted_fsync(handle: int) -> None:
        calls.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{handle}')).name}")
        fsync(handle)

    def noted_rename(source: Path, target: Path) -> None:
        calls.append(f"rename {source.name} {target.name}")
        rename(source, target)

    commit.start_writing(tmp_path, 7)
    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    commit.commit(tmp_path, 7, text="{}")
    manifest, *rest = calls
    assert manifest.startswith("fsync .manifest.json.")
    renamed = "rename step-00000007.tmp step-00000007"
    assert rest == ["fsync step-00000007.tmp", renamed, f"fsync {tmp_path.name}"]


class Killed(BaseException):
    """In the place of SIGKILL: nothing after it runs."""


@pytest.mark.parametrize("can_swap", [True, False])
@pytest.mark.parametrize("num_calls", range(4))
def test_a_step_that_is_saved_again_exists_at_every_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_swap: bool, num_calls: int
) -> None:
    """Killed before the n-th rename of a second save of step 2, the older or the newer save of it
    is found.
    """
    save(tmp_path, 1)
    save(tmp_path, 2)
    left, calls = num_calls, []

    def killed(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **options: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            calls.append(name)
            return real(*args, **options)

        return call

    real = commit.swap_names if can_swap else lambda first, second: False
    monkeypatch.setattr(commit, "swap_names", killed("swap", real))
    for name in ("rename", "rmdir"):
        monkeypatch.setattr(os, name, killed(name, getattr(os, name)))
    again = checkpointer(tmp_path)
    with suppress(Killed):
        again.save(2, {BOX: torch.full((64,), 7.0)}, objects={}, config={}, topology={})
    monkeypatch.undo()

    resumed_from = store.checkpoint_to_resume(tmp_path / "checkpoints")
    assert resumed_from is not None and resumed_from.name.startswith("step-00000002")
    commits = ["swap"] if can_swap else ["swap", "rename", "rename"]
    assert value(tmp_path, resumed_from) == (7.0 if calls[: len(commits)] == commits else 2.0)
    save(tmp_path, 3, keep_last=2)
    step_2 = store.step_folder(tmp_path / "checkpoints", 2).name
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == [step_2 if resumed_from.name == step_2 else resumed_from.name, "step-00000003"]


def test_a_checkpoint_may_be_moved_and_renamed(tmp_path: Path) -> None:
    moved = Path(shutil.move(save(tmp_path, 1), tmp_path / "best"))

    assert store.find_checkpoint(moved) == moved
    assert value(tmp_path, moved) == 1.0


def test_a_run_that_goes_back_sets_later_checkpoints_aside(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    kept = [save(tmp_path, step) for step in (10, 20, 30)][1]

    aside = commit.set_aside_after(folder, 20)

    assert [path.name for path in aside] == ["step-00000030.superseded-1"]
    assert store.newest_complete(folder) == kept
    save(tmp_path, 30)
    assert [path.name for path in commit.set_aside_after(folder, 20)] == [
        "step-00000030.superseded-2"
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("latest_checkpointed_iteration.txt", "of Megatron-LM.*checkpoint import-megatron"),
        ("common.pt", "of Megatron-LM.*checkpoint import-megatron"),
        (".metadata", "of torch.distributed.checkpoint.*checkpoint import-dcp"),
        ("step-100/.metadata", "of torch.distributed.checkpoint.*checkpoint import-dcp"),
    ],
)
def test_a_checkpoint_of_another_program_is_named_with_its_import(
    tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("")
    for folder in {tmp_path, (tmp_path / name).parent}:
        with pytest.raises(CheckpointError, match=message):
            store.find_manifest(folder)
