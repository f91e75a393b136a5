"""Checkpoints in the memory of hosts: kills at random instants, and a lack of memory.

`tests/laws/test_memory_checkpoints.py` has whole runs.
"""

import os
import random
import shutil
import signal
import threading
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from nanotrain.checkpoint import memory_checkpointer
from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.checkpoint.memory_checkpointer import (
    MemoryCheckpointer,
    open_host_memory,
)
from nanotrain.checkpoint.memory_start import MemoryReader, find_memory_start
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.errors import StorageFault
from nanotrain.spec.boxes import Box, TensorBox
from nanotrain.topology.partners import Host
from tests.harness import run_ranks
from tests.test_two_hosts import DRILLS

CONTENT: dict[str, Any] = {"objects": {}, "config": {}, "topology": {}}
HOSTS = (Host("a"), Host("a"), Host("b"), Host("b"))
ROWS, COLUMNS = 40, 64


def shard_of(rank: int, step: int) -> dict[TensorBox, torch.Tensor]:
    """A quarter of the rows of a tensor whose values tell the step."""
    rows = ROWS // len(HOSTS)
    box = Box((rank * rows, 0), ((rank + 1) * rows, COLUMNS))
    values = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS) + step
    return {TensorBox("model/weight", (ROWS, COLUMNS), box): values[box.slices()].clone()}


def save_until_killed(ctx: ParallelContext, folder: Path, after_s: float) -> None:
    """Save step after step; the first rank writes the last step that is complete."""
    if ctx.rank == 0:
        threading.Timer(after_s, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    with open_host_memory(folder / "memory", "run", group=ctx.control, hosts=HOSTS) as memory:
        writer = MemoryCheckpointer(memory, store=ctx.store, timeout_s=60)
        for step in count(1):
            writer.start_save(step, shard_of(ctx.rank, step), **CONTENT)
            writer.wait()
            if ctx.rank == 0:
                (folder / "complete").write_text(str(step))


def read_newest(ctx: ParallelContext, folder: Path) -> tuple[int, bool]:
    """The step that a start finds, and whether this rank reads the values of the step."""
    with open_host_memory(folder / "memory", "run", group=ctx.control, hosts=HOSTS) as memory:
        start = find_memory_start(memory, at_least=0, accepts=lambda manifest: "")
        if start is None:
            return 0, True
        # another shard than that which it saved
        expected = shard_of((ctx.rank + 1) % len(HOSTS), start.step)
        targets = {box: torch.zeros_like(tensor) for box, tensor in expected.items()}
        stored = Checkpointer(folder / "disk", group=ctx.control)
        MemoryReader(stored, memory, start=start).restore(start.path(memory), targets)
        is_equal = all(torch.equal(targets[box], tensor) for box, tensor in expected.items())
        return start.step, is_equal


def kill_and_read(folder: Path, after_s: float, lost: str | None) -> tuple[int, int]:
    """The last step that was complete before a kill, and the step of the start after it."""
    (folder / "memory").mkdir(parents=True)
    with pytest.raises(pytest.fail.Exception, match="code -9"):
        run_ranks(len(HOSTS), save_until_killed, folder, after_s)
    if lost is not None:
        for path in folder.glob(f"memory/nanotrain-*/{lost}"):
            shutil.rmtree(path)
    replies = run_ranks(len(HOSTS), read_newest, folder, shares=True)
    assert all(is_equal for _, is_equal in replies)
    complete = folder / "complete"
    text = complete.read_text() if complete.exists() else ""
    return int(text or 0), replies[0][0]


@pytest.mark.timeout(3600)
def test_a_kill_at_any_instant_loses_no_complete_step(tmp_path: Path) -> None:
    """With the folders of all hosts, of one of them, and of the other one."""
    num_kills = 100 if os.environ.get(DRILLS) else 3
    draw = random.Random(7)
    found = []
    for number in range(num_kills):
        folder = tmp_path / str(number)
        lost = (None, "a", "b")[number % 3]
        complete, step = kill_and_read(folder, draw.uniform(0.3, 0.9), lost)
        # a save may be committed and not yet noted
        assert complete <= step <= complete + 1, (number, lost)
        found.append(step)
        shutil.rmtree(folder)
    assert max(found) > 1


def save_with_little_memory(ctx: ParallelContext, folder: Path) -> str:
    usage = shutil.disk_usage(folder)
    memory_checkpointer.shutil.disk_usage = lambda path: usage._replace(total=80_000, free=12_000)
    with open_host_memory(folder, "run", group=ctx.control, hosts=HOSTS) as memory:
        writer = MemoryCheckpointer(memory, store=ctx.store, timeout_s=60)
        with pytest.raises(StorageFault) as fault:
            writer.start_save(1, shard_of(ctx.rank, 1), **CONTENT)
        assert not list(memory.folder.glob("step-*")) or not memory.is_host_first
    return str(fault.value)


def test_a_save_that_does_not_fit_leaves_the_memory_to_others(tmp_path: Path) -> None:
    """10,240 bytes of two ranks and as many of their partners, 10,000 stay free."""
    for text in run_ranks(len(HOSTS), save_with_little_memory, tmp_path):
        assert "a host lacks 8.2 kB: a checkpoint takes 10.2 kB" in text
        assert "--memory-checkpoint-dir" in text
