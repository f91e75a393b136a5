"""SIGKILL of one or of both ranks of a save leaves the older checkpoint or the new one, whole.

A sample of instants; `scripts/kill_drill` kills whole runs, with their launcher, at more of them.
"""

import itertools
import os
import signal
import socket
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nanotrain.checkpoint import all_ranks, store
from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.checkpoint.read import read_global_tensors
from nanotrain.checkpoint.remote_checkpointer import RemoteCheckpointer
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.parallel import ParallelConfig
from nanotrain.spec.boxes import Box, TensorBox
from nanotrain.storage.remote import Remote
from nanotrain.topology.topology import Topology
from tests.checkpoint.test_kill_points import CALLS
from tests.checkpoint.test_store import save
from tests.harness import HANG_S, forkserver

SIZE = 2
INSTANTS = 0.0, 0.5, 1.0  # of each rank, as shares of its calls
# rows, of which the second rank has the larger part
TENSORS = {"model/first": 90, "model/second": 7}


@dataclass(frozen=True)
class Kill:
    """Which rank kills at which of its calls; None: it counts them. `run` is the address where
    there is one.
    """

    folder: Path
    is_async: bool
    run: Remote | None = None
    rank: int = 0
    instant: int | None = None
    kills_both: bool = False

    @property
    def checkpoints(self) -> Path:
        return self.folder / (self.run.path if self.run else "") / "checkpoints"


@pytest.mark.parametrize("is_async", [False, True], ids=["save", "start_save"])
def test_a_kill_of_one_or_both_ranks_leaves_a_whole_checkpoint(
    tmp_path: Path, is_async: bool
) -> None:
    """The ranks are forked from a process without threads, which this one is not."""
    process = forkserver().Process(target=kill_at_all_instants, args=(tmp_path, is_async))
    process.start()
    process.join(HANG_S)
    assert not process.is_alive(), f"the ranks hang; their folders are in {tmp_path}"
    assert process.exitcode == 0, (tmp_path / "error").read_text()


def kill_at_all_instants(folder: Path, is_async: bool) -> None:
    try:
        torch.set_num_threads(1)
        counted = Kill(folder / "counted", is_async)
        assert save_on_two_ranks(counted) == [0, 0]
        steps = [check(kill) for kill in sampled(counted)]
        assert set(steps) == {2, 3}, (
            "the first instants are before the new checkpoint, the last behind it"
        )
    except BaseException:
        (folder / "error").write_text(traceback.format_exc())
        raise


def sampled(counted: Kill, instants: Sequence[float] = INSTANTS) -> Iterator[Kill]:
    """Kill at instants of each rank, in turn both ranks and one; yields each kill after it."""
    for rank in range(SIZE):
        calls = int((counted.folder / f"calls-{rank}").read_text())
        assert calls > len(instants)
        for number, share in enumerate(instants):
            name, instant = f"{rank}-{number}", int(share * (calls - 1))
            kill = replace(counted, rank=rank, instant=instant, kills_both=number % 2 == 0)
            kill = replace(
                kill, folder=counted.folder.parent / name, run=kill.run and kill.run.parent / name
            )
            codes = save_on_two_ranks(kill)
            assert codes[kill.rank] == -signal.SIGKILL, (kill, codes)
            yield kill


def check(kill: Kill) -> int:
    """The step of the checkpoint that is left by a kill."""
    resumed_from = store.checkpoint_to_resume(kill.checkpoints)
    assert resumed_from is not None, f"{kill}: no checkpoint is left"
    step = store.read_manifest(resumed_from).step
    tensors = dict(read_global_tensors(resumed_from, list(TENSORS)))  # compares checksums
    assert all(
        (tensors[name] == step).all() and len(tensors[name]) == rows
        for name, rows in TENSORS.items()
    ), kill
    save(kill.folder, 4, keep_last=1)
    assert [path.name for path in kill.checkpoints.iterdir()] == ["step-00000004"], kill
    return step


def save_on_two_ranks(kill: Kill) -> list[int]:
    """Save steps 2 and 3 on two forked ranks, the latter with a kill; their exit codes, minus the
    signal.
    """
    kill.folder.mkdir()
    pids = []
    for rank in range(SIZE):
        pid = os.fork()
        if pid == 0:
            run_rank(kill, rank)
        pids.append(pid)
    codes: dict[int, int] = {}
    while len(codes) < SIZE:
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid]:  # as a launcher does
            for survivor in set(pids) - set(codes):
                os.kill(survivor, signal.SIGKILL)
    return [codes[pid] for pid in pids]


def run_rank(kill: Kill, rank: int) -> None:
    try:
        url = f"file://{kill.folder}/rendezvous"
        dist.init_process_group("gloo", init_method=url, rank=rank, world_size=SIZE)
        context = ParallelContext.attach(Topology.of(ParallelConfig(), SIZE), timeout_s=HANG_S)
        writer = Checkpointer(kill.checkpoints, group=context.control, keep_last=1)
        if kill.run:
            writer = RemoteCheckpointer(writer, kill.run, store=context.store)
        write(writer, 2)
        (kill.folder / f"pid-{rank}").write_text(str(os.getpid()))
        dist.barrier()
        calls = count_calls(kill, rank)
        if kill.is_async:
            write(writer, 3, is_async=True)
            writer.wait()
        else:
            write(writer, 3)
        (kill.folder / f"calls-{rank}").write_text(str(next(calls)))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def write(writer: Checkpointer, step: int, *, is_async: bool = False) -> None:
    """Save every tensor, each rank its rows."""
    tensors = {}
    for name, rows in TENSORS.items():
        ends = [0, rows] if writer.group.size == 1 else [0, rows // 3, rows]
        begin, end = ends[writer.group.index :][:2]
        tensors[TensorBox(name, (rows,), Box((begin,), (end,)))] = torch.full(
            (end - begin,), float(step)
        )
    content: dict[str, Any] = {"objects": {}, "config": {}, "topology": {}}
    writer.start_save(step, tensors, **content) if is_async else writer.save(
        step, tensors, **content
    )


def count_calls(kill: Kill, rank: int) -> "itertools.count[int]":
    """Count the calls that change the disk, communicate or send, and kill at one; the next number."""
    numbers = itertools.count()  # threads take from it without a lock

    def counted(real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if (rank, next(numbers)) == (kill.rank, kill.instant):
                if kill.kills_both:
                    os.kill(int((kill.folder / f"pid-{1 - rank}").read_text()), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    for name in ("gather_object", "broadcast_object", "all_reduce_scalars"):
        setattr(all_ranks, name, counted(getattr(all_ranks, name)))
    Remote._client = counted(Remote._client)  # type: ignore[method-assign]  # before each request
    socket.socket.send = in_parts(socket.socket.send, counted(lambda: None))  # type: ignore[method-assign]
    return numbers


def in_parts(real: Any, count: Any) -> Any:
    """A function that sends, which counts every 64 KiB; the number of calls depends on how busy the
    machine is.
    """
    sent = 0

    def call(*args: Any) -> Any:
        nonlocal sent
        before, result = sent, real(*args)
        sent += result
        for _ in range(sent // 2**16 - before // 2**16):
            count()
        return result

    return call
