"""A writer that is killed at any system call of a save leaves the older checkpoint or the new one, whole."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from nanotrain.checkpoint import store
from tests.checkpoint.test_store import BOX, checkpointer, save, value

# What changes the disk. Reads are no instants: nothing differs between one and the next.
CALLS = ("open", "pwrite", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir")
MIN_INSTANTS = 20


class Killed(BaseException):
    """In the place of SIGKILL: nothing after it runs, as every later call raises it too."""


class Disk:
    """The calls of `os`, of which those from number `limit` on do not happen."""

    def __init__(self, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.limit, self.count, self.is_killed = limit, 0, False
        self._others = set(threading.enumerate()) - {threading.current_thread()}  # left by other tests
        for name in CALLS:
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if threading.current_thread() in self._others:
                return real(*args, **options)
            self.count += 1
            self.is_killed |= self.count > self.limit
            if self.is_killed:
                raise Killed
            return real(*args, **options)

        return call


def save_until(folder: Path, limit: int, *, is_async: bool) -> bool:
    """Save step 3 over steps 1 and 2, killed at a call; returns whether it was killed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda _: None)
        disk = Disk(limit, patch)
        writer, tensors = checkpointer(folder, keep_last=1), {BOX: torch.full((64,), 3.0)}
        content: dict[str, Any] = {"objects": {}, "config": {}, "topology": {}}
        try:
            if is_async:
                writer.start_save(3, tensors, **content)
                writer.wait()
            else:
                writer.save(3, tensors, **content)
        except Killed:
            pass
        return disk.is_killed


@pytest.mark.parametrize("is_async", [False, True], ids=["save", "start_save"])
def test_a_kill_at_any_call_leaves_a_whole_checkpoint_and_the_next_save_cleans_up(
    tmp_path: Path, is_async: bool
) -> None:
    instants, values = 0, []
    while True:
        folder = tmp_path / str(instants)
        for step in (1, 2):
            save(folder, step)
        was_killed = save_until(folder, instants, is_async=is_async)
        found = store.checkpoint_to_resume(folder / "checkpoints")
        assert found is not None, f"after {instants} calls no checkpoint is left"
        values.append(value(folder, found))
        save(folder, 4, keep_last=1)
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000004"], instants
        if not was_killed:
            break
        instants += 1
    assert instants >= MIN_INSTANTS
    assert values == sorted(values) and set(values) == {2.0, 3.0}, "from one call on it is the new checkpoint"
