"""A writer that is killed at any system call of a save leaves the older checkpoint or the new one,
whole.
"""

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from nanotrain.checkpoint import store
from nanotrain.errors import StorageFault
from tests.checkpoint.test_store import BOX, checkpointer, save, value

# What changes the disk. Reads are no instants: nothing differs between one and the next.
CALLS = ("open", "pwrite", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir")
NEED_SPACE = ("open", "pwrite", "fsync", "mkdir", "rename", "replace")
MIN_INSTANTS = 20


class Killed(BaseException):
    """In the place of SIGKILL: nothing after it runs, as every later call raises it too."""


class Disk:
    """The calls of `os`, of which those from number `limit` on do not happen."""

    def __init__(
        self,
        limit: int,
        monkeypatch: pytest.MonkeyPatch,
        *,
        calls: Sequence[str] = CALLS,
        error: BaseException | type[BaseException] = Killed,
    ) -> None:
        self.limit, self.count, self.is_killed, self.error = limit, 0, False, error
        # left by other tests
        self._others = set(threading.enumerate()) - {threading.current_thread()}
        for name in calls:
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if threading.current_thread() in self._others:
                return real(*args, **options)
            self.count += 1
            self.is_killed |= self.count > self.limit
            if self.is_killed:
                raise self.error
            return real(*args, **options)

        return call


def save_until(folder: Path, limit: int, *, step: int = 3, is_async: bool) -> bool:
    """Save 3.0 as a step beside steps 1 and 2, killed at a call; returns whether it was killed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda _: None)
        disk = Disk(limit, patch)
        writer, tensors = checkpointer(folder, keep_last=1), {BOX: torch.full((64,), 3.0)}
        content: dict[str, Any] = {"objects": {}, "config": {}, "topology": {}}
        try:
            if is_async:
                writer.start_save(step, tensors, **content)
                writer.wait()
            else:
                writer.save(step, tensors, **content)
        except Killed:
            pass
        return disk.is_killed


@pytest.mark.parametrize(
    ("step", "is_async"), [(3, False), (3, True), (2, False)], ids=["save", "start_save", "again"]
)
def test_a_kill_at_any_call_leaves_a_whole_checkpoint_and_the_next_save_cleans_up(
    tmp_path: Path, step: int, is_async: bool
) -> None:
    instants, values = 0, []
    while True:
        folder = tmp_path / str(instants)
        for step in (1, 2):
            save(folder, step)
        was_killed = save_until(folder, instants, step=step, is_async=is_async)
        resumed_from = store.checkpoint_to_resume(folder / "checkpoints")
        assert resumed_from is not None, f"after {instants} calls no checkpoint is left"
        values.append(value(folder, resumed_from))
        save(folder, 4, keep_last=1)
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000004"], (
            instants
        )
        if not was_killed:
            break
        instants += 1
    assert instants >= MIN_INSTANTS
    assert values == sorted(values) and set(values) == {2.0, 3.0}, (
        "from one call on it is the new checkpoint"
    )


@pytest.mark.parametrize("is_async", [False, True], ids=["save", "start_save"])
def test_a_disk_that_is_full_from_any_call_on_is_a_storage_fault_after_which_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    """A StorageFault is the error after which the trainer saves again at the next interval."""
    instants, is_full = 0, True
    no_space = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    while is_full:
        folder = tmp_path / str(instants)
        older = save(folder, 1)
        writer, content = checkpointer(folder), {"objects": {}, "config": {}, "topology": {}}
        writer.save(2, {BOX: torch.full((64,), 2.0)}, **content)
        with monkeypatch.context() as patch:
            disk = Disk(instants, patch, calls=NEED_SPACE, error=no_space)
            try:
                if is_async:
                    writer.start_save(3, {BOX: torch.full((64,), 3.0)}, **content)
                    writer.wait()
                else:
                    writer.save(3, {BOX: torch.full((64,), 3.0)}, **content)
            except StorageFault as error:
                assert "No space left on device" in str(error) and "bytes free in" in str(error)
                assert disk.is_killed and writer.num_failed == 1
            is_full = disk.is_killed
        assert store.complete_checkpoints(folder / "checkpoints")[:2] == [
            older,
            older.with_name("step-00000002"),
        ]
        writer.save(4, {BOX: torch.full((64,), 4.0)}, **content)
        names = {path.name for path in (folder / "checkpoints").iterdir()}
        assert (
            names <= {f"step-{step:08d}" for step in (1, 2, 3, 4)} and "step-00000004" in names
        ), names
        instants += 1
    assert instants > 5
