"""A world of processes on this machine, without torchrun: `run_ranks` starts them, hands each its context, gathers.

    fork server (torch imported once) -> ranks 0 .. n-1 -> a file -> gloo groups -> work(context, ...) -> pipes

For checks that a command makes by itself; training is started by torchrun. Ranks are CPU processes of one thread each.
The first rank that fails ends them all, and its error is raised here.
"""

import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from nanotrain.comm.collectives import barrier
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.errors import EnvironmentFault, NanotrainError
from nanotrain.log import start_logging
from nanotrain.topology.topology import Topology

# How long to look, after a failure, for the one that caused it: ranks that lost a neighbour may speak first.
_SECOND_FAILURE_S = 1.0


@dataclass(frozen=True)
class _Answer:
    """What a rank sends back: its value, or how it failed; `error` is None for what no `NanotrainError` describes."""

    value: Any = None
    error: tuple[type[NanotrainError], str, str, str] | None = None
    trace: str = ""


@dataclass(frozen=True)
class _Task:
    """What a rank is told: its place in the world, and what to do there."""

    topology: Topology
    rank: int
    meeting: Path
    timeout_s: float
    work: Callable[..., Any]
    arguments: tuple[Any, ...]


def run_ranks(
    topology: Topology, work: Callable[..., Any], *, arguments: Sequence[Any] = (), timeout_s: float = 300.0
) -> list[Any]:
    """Call `work(context, *arguments)` on every rank of a new world of local CPU processes.

    Args:
        topology: of the world.
        work: a function at the top of a module; its arguments and what it returns must be picklable.
        arguments: the same for every rank.
        timeout_s: how long any collective waits for a late rank.

    Returns:
        what each rank returned, by rank.

    Raises:
        NanotrainError: what the first failing rank raised.
        EnvironmentFault: a rank died.
        RuntimeError: a rank failed otherwise; its traceback is the message.
    """
    server = _fork_server(work.__module__)
    with TemporaryDirectory(prefix="nanotrain-ranks-") as folder:
        children, pipes = [], []
        try:
            for rank in range(topology.world_size):
                ours, theirs = server.Pipe(duplex=False)
                task = _Task(topology, rank, Path(folder) / "meeting", timeout_s, work, tuple(arguments))
                child = server.Process(target=_play, args=(task, theirs), daemon=True)
                child.start()
                theirs.close()
                children.append(child)
                pipes.append(ours)
            return _gather(pipes)
        finally:
            for child in children:
                child.kill()
                child.join()


def _fork_server(module: str) -> Any:
    """The process that ranks are forked from; it starts with the first of them and reads the environment then."""
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name need not resolve
    server = multiprocessing.get_context("forkserver")
    # torch's optimizers import torch._dynamo when the first is made: seconds on every rank.
    server.set_forkserver_preload(["torch", "torch._dynamo", module])
    return server


def _gather(pipes: Sequence[Connection]) -> list[Any]:
    """Every rank's value; raises at the first failure that does not echo another's."""
    answers: dict[int, _Answer] = {}
    failures: list[int] = []
    deadline: float | None = None
    while len(answers) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in answers}
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = multiprocessing.connection.wait(list(waiting), timeout=left)
        if not ready:
            break
        for pipe in ready:
            rank = waiting[pipe]  # type: ignore[index]
            answers[rank] = _receive(pipes[rank], rank)
            if answers[rank].error or answers[rank].trace:
                failures.append(rank)
                deadline = deadline or time.monotonic() + _SECOND_FAILURE_S
    if not failures:
        return [answers[rank].value for rank in range(len(pipes))]
    causes = [answers[rank] for rank in failures]
    cause = next((answer for answer in causes if not _is_echo(answer)), causes[0])
    if cause.error is None:
        raise RuntimeError(cause.trace)
    kind, what, why, fix = cause.error
    raise kind(what, why=why, fix=fix)


def _is_echo(answer: _Answer) -> bool:
    """Whether a rank only noticed that another one was lost."""
    return answer.error is not None and issubclass(answer.error[0], EnvironmentFault)


def _receive(pipe: Connection, rank: int) -> _Answer:
    try:
        answer = pickle.loads(pipe.recv_bytes())
        assert isinstance(answer, _Answer), "ranks send answers"
        return answer
    except EOFError:
        fix = "run on fewer ranks or free memory"
        return _Answer(error=(EnvironmentFault, f"rank {rank} died", "most often memory ran out", fix))


def _play(task: _Task, pipe: Connection) -> None:
    """One rank, in a process of its own: join, work, answer, leave at once."""
    pipe.send_bytes(pickle.dumps(_answer(task)))
    pipe.close()
    os._exit(0)  # nothing to tidy up: interpreter and gloo teardown would cost more than most checks


def _answer(task: _Task) -> _Answer:
    torch.set_num_threads(1)
    start_logging(is_first=task.rank == 0, level=logging.ERROR)
    try:
        size = task.topology.world_size
        if size > 1:
            timeout = timedelta(seconds=task.timeout_s)
            meeting = f"file://{task.meeting}"
            dist.init_process_group("gloo", init_method=meeting, rank=task.rank, world_size=size, timeout=timeout)
        context = ParallelContext.attach(task.topology, timeout_s=task.timeout_s)
        value = task.work(context, *task.arguments)
        barrier(context.control)  # nobody leaves while another rank still reads from it
        return _Answer(value)
    except NanotrainError as error:
        return _Answer(error=(type(error), error.what, error.why, error.fix))
    except Exception:
        return _Answer(trace=f"rank {task.rank}: {traceback.format_exc()}")
