"""A run saves in memory while it runs, goes on where memory is short, and leaves nothing behind."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from nanotrain.checkpoint import memory_checkpointer
from nanotrain.train.hooks.memory_checkpoint import MemoryCheckpointHook
from nanotrain.train.resume.from_memory import open_memory_checkpoints
from tests.train.small_run import Spy, small_run, train


class Watching(Spy):
    """Notes the steps in memory after each step of the run."""

    def __init__(self, memory: Path) -> None:
        super().__init__()
        self.memory = memory
        self.seen: set[str] = set()

    def after_step(self, run: Any, report: Any) -> None:
        super().after_step(run, report)
        self.seen |= {path.name for path in self.memory.glob("nanotrain-*/*/*/step-*")}


def train_small(folder: Path) -> Watching:
    memory = folder / "memory"
    memory.mkdir()
    words = f"--train-iters 6 --memory-checkpoint-interval 2 --memory-checkpoint-dir {memory}"
    spy = Watching(memory)
    with small_run(folder / "run", *words.split()) as run:
        opened = open_memory_checkpoints(run.plan, run.inputs, context=run.context)
        with opened as inputs:
            (folder / "run" / "starts.jsonl").write_text('{"step": 0}\n')
            object.__setattr__(run, "inputs", inputs)
            train(run, MemoryCheckpointHook(), spy)
    return spy


def test_a_run_saves_in_memory_and_removes_it_in_the_end(tmp_path: Path) -> None:
    spy = train_small(tmp_path)

    assert any(name.startswith("step-00000002") for name in spy.seen)
    assert spy.calls[-2:] == ["after", "closed"] and not any((tmp_path / "memory").iterdir())


def test_a_run_goes_on_where_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(memory_checkpointer.shutil, "disk_usage", lambda path: full)
    logging.getLogger("nanotrain").propagate = True
    with caplog.at_level(logging.WARNING, logger="nanotrain"):
        spy = train_small(tmp_path)

    assert "step 6" in spy.calls
    assert "no memory checkpoint of step 2: a host lacks" in caplog.text
