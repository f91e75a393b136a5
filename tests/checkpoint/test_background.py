"""Saves in the background: copies in host memory, the thread of a rank, and reports through files."""

import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nanotrain.checkpoint import background
from nanotrain.checkpoint.background import (
    BackgroundSave,
    StagingBuffers,
    merge_apart,
    merge_reports,
    report_path,
    wait_for_reports,
    write_failure,
    write_report,
)
from nanotrain.checkpoint.commit import merge_shards
from nanotrain.checkpoint.store import read_manifest
from nanotrain.errors import CheckpointError, StorageFault
from nanotrain.spec.boxes import Box, TensorBox
from tests.checkpoint.test_commit import MANIFEST, shards


def test_the_result_and_the_error_of_the_thread_are_the_caller_s() -> None:
    assert BackgroundSave(lambda is_cancelled: Path("step")).result() == Path("step")

    def fail(is_cancelled: Callable[[], bool]) -> None:
        raise OSError("full")

    save = BackgroundSave(fail)
    with pytest.raises(StorageFault, match="full"):
        save.result()
    assert not save.give_up(0.0) and not save.is_running


def test_a_cancelled_save_has_ended_when_cancel_returns() -> None:
    begun, seen = threading.Event(), threading.Event()

    def wait_for_ever(is_cancelled: Callable[[], bool]) -> None:
        begun.set()
        while not is_cancelled():
            seen.wait(0.001)
        seen.set()

    save = BackgroundSave(wait_for_ever)
    begun.wait()
    assert save.is_running
    save.cancel()
    assert seen.is_set() and not save.is_running


def test_giving_up_waits_no_longer_than_its_timeout_and_cancels() -> None:
    may_end = threading.Event()

    def until_cancelled(is_cancelled: Callable[[], bool]) -> None:
        may_end.wait(60)
        assert is_cancelled(), "a save that was given up must not commit"

    save = BackgroundSave(until_cancelled)
    assert not save.give_up(0.0) and save.is_running
    may_end.set()
    assert save.result() is None
    assert save.give_up(0.0)


def test_an_interrupted_wait_cancels_the_save_and_no_thread_writes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def until_cancelled(is_cancelled: Callable[[], bool]) -> None:
        while not is_cancelled():
            threading.Event().wait(0.001)

    def interrupt(*_: object) -> None:
        raise InterruptedError

    save = BackgroundSave(until_cancelled)
    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(background, "wait", interrupt)
        save.give_up(60.0)
    assert save.result() is None, "it was cancelled"
    nobody_waits = BackgroundSave(until_cancelled)
    background.cancel_all()
    assert not nobody_waits.is_running and not background._running


A, B = TensorBox("model/a", (8, 4), Box((2, 0), (6, 4))), TensorBox.full("model/b", (3,))


def test_copies_do_not_change_with_the_tensors_and_their_memory_is_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(background, "synchronize", waited.append)
    monkeypatch.setattr(background.split_box, "__kwdefaults__", {"limit": 16})  # a row of A
    staging, tensor = StagingBuffers(), torch.arange(16.0).view(4, 4).T
    first = staging.copy({A: tensor, B: torch.ones(3)})
    expected, pointer = tensor.clone(), first[A].data_ptr()
    tensor.zero_()
    assert torch.equal(first[A], expected) and first[A].is_contiguous()
    assert waited == [torch.device("cpu")], "copies from a device are complete on return"
    assert (
        staging.copy({A: tensor, B: torch.ones(3)})[A].data_ptr() == pointer
        and first[A].count_nonzero() == 0
    )


def test_memory_of_another_dtype_or_of_a_tensor_that_is_gone_is_released() -> None:
    staging = StagingBuffers()
    held = [
        weakref.ref(tensor)
        for tensor in staging.copy({A: torch.ones(4, 4), B: torch.ones(3)}).values()
    ]
    copies = staging.copy({B: torch.ones(3, dtype=torch.bfloat16)})
    assert copies[B].dtype is torch.bfloat16
    assert [reference() for reference in held] == [None, None]


def test_reports_through_files_are_those_written_and_leave_nothing(tmp_path: Path) -> None:
    written = shards(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    later = threading.Timer(0.1, write_report, (tmp_path, written[0]), {"index": 0})
    later.start()
    write_report(tmp_path, written[1], index=1)

    sizes = wait_for_reports(tmp_path, 2, timeout_s=30, is_cancelled=lambda: False)
    assert sizes == sum(report_path(tmp_path, index).stat().st_size for index in range(2))
    merge_reports(tmp_path, 2, manifest=MANIFEST)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, "manifest.json"])
    assert read_manifest(tmp_path) == merge_shards(MANIFEST, written)


def test_a_process_of_its_own_merges_as_a_thread_does_and_raises_its_errors(tmp_path: Path) -> None:
    written = shards(tmp_path)
    for index, shard in enumerate(written):
        write_report(tmp_path, shard, index=index)
    merge_apart(tmp_path, 2, manifest=MANIFEST, is_cancelled=lambda: False)
    assert read_manifest(tmp_path) == merge_shards(MANIFEST, written)
    for index in range(2):
        write_report(tmp_path, written[0], index=index)
    with pytest.raises(CheckpointError, match="do not cover"):
        merge_apart(tmp_path, 2, manifest=MANIFEST, is_cancelled=lambda: False)
    with pytest.raises(OSError, match="the merge of 2 reports ended with code -9"):
        merge_apart(tmp_path, 2, manifest=MANIFEST, is_cancelled=lambda: True)


def test_the_failure_of_a_rank_and_a_rank_that_never_reports_are_errors_with_its_number(
    tmp_path: Path,
) -> None:
    write_failure(tmp_path, OSError(28, "No space left on device"), index=1)
    with pytest.raises(OSError, match="rank 1 could not write: .*No space left"):
        wait_for_reports(tmp_path, 2, timeout_s=30, is_cancelled=lambda: False)
    report_path(tmp_path, 1).unlink()
    with pytest.raises(OSError, match="rank 0-1 of 2 did not finish writing within 0.05 s"):
        wait_for_reports(tmp_path, 2, timeout_s=0.05, is_cancelled=lambda: False)
    with pytest.raises(OSError, match="rank 0-1 of 2"):
        wait_for_reports(tmp_path, 2, timeout_s=30, is_cancelled=lambda: True)
