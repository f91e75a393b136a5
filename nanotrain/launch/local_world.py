"""`run_ranks` runs a function on every rank of a new world of processes on this machine, without torchrun.

    fork server (torch imported once) -> ranks 0 .. n-1 -> a file -> gloo groups -> function(context, ...) -> pipes

For checks that a command runs by itself; training is started by torchrun. Ranks are CPU processes with one thread each.
The first rank that fails ends all others, and its error is raised in the caller.
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

# After a failure, wait this long for other failures: a rank that lost its peer may report before the peer does.
_SECOND_FAILURE_S = 1.0


@dataclass(frozen=True)
class _Reply:
    """The result of a rank, its `NanotrainError`, the traceback of any other error, or the fact that it died."""

    result: Any = None
    error: NanotrainError | None = None
    traceback: str = ""
    has_died: bool = False


@dataclass(frozen=True)
class _Task:
    """The arguments of a rank's process."""

    topology: Topology
    rank: int
    rendezvous: Path
    timeout_s: float
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def run_ranks(
    topology: Topology, function: Callable[..., Any], *, arguments: Sequence[Any] = (), timeout_s: float = 300.0
) -> list[Any]:
    """Call `function(context, *arguments)` on every rank of a new world of local CPU processes.

    Args:
        function: a module-level function; its arguments and results must be picklable.
        arguments: the same for every rank.
        timeout_s: how long a collective waits for a slow or lost rank.

    Returns:
        The results, by rank.

    Raises:
        NanotrainError: the error of the first failing rank.
        EnvironmentFault: a rank died.
        RuntimeError: another error of a rank; its traceback is the message.
    """
    server = _fork_server(function.__module__)
    with TemporaryDirectory(prefix="nanotrain-ranks-") as folder:
        processes, pipes = [], []
        try:
            for rank in range(topology.world_size):
                receiver, sender = server.Pipe(duplex=False)
                task = _Task(topology, rank, Path(folder) / "rendezvous", timeout_s, function, tuple(arguments))
                process = server.Process(target=_run_rank, args=(task, sender), daemon=True)
                process.start()
                sender.close()
                processes.append(process)
                pipes.append(receiver)
            return _gather(pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _fork_server(module: str) -> Any:
    """The process that ranks are forked from; it starts with the first rank and reads the environment then."""
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host name may not resolve
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["torch", module])
    return server


def _gather(pipes: Sequence[Connection]) -> list[Any]:
    """Every rank's result; raises the first error that is not a consequence of another rank's."""
    replies: dict[int, _Reply] = {}
    failures: list[_Reply] = []
    deadline: float | None = None
    while len(replies) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in replies}
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = multiprocessing.connection.wait(list(waiting), timeout=timeout)
        if not ready:
            break
        for pipe in ready:
            rank = waiting[pipe]  # type: ignore[index]
            replies[rank] = _receive(pipes[rank], rank)
            if replies[rank].error or replies[rank].traceback:
                failures.append(replies[rank])
                deadline = deadline or time.monotonic() + _SECOND_FAILURE_S
    if not failures:
        return [replies[rank].result for rank in range(len(pipes))]
    # A rank whose peer failed raises an EnvironmentFault, and may be read before the peer that died.
    causes = [reply for reply in failures if reply.has_died or not isinstance(reply.error, EnvironmentFault)]
    cause = (causes or failures)[0]
    raise cause.error or RuntimeError(cause.traceback)


def _receive(pipe: Connection, rank: int) -> _Reply:
    try:
        reply = pickle.loads(pipe.recv_bytes())
    except EOFError:
        fix = "run on fewer ranks or free memory"
        fault = EnvironmentFault(f"rank {rank} died", why="usually the machine ran out of memory", fix=fix)
        return _Reply(error=fault, has_died=True)
    assert isinstance(reply, _Reply), "ranks send replies only"
    return reply


def _run_rank(task: _Task, pipe: Connection) -> None:
    """Run one rank in this process, send its reply and exit."""
    pipe.send_bytes(pickle.dumps(_reply(task)))
    pipe.close()
    os._exit(0)  # skip the teardown of the interpreter and of gloo, which takes longer than most checks


def _reply(task: _Task) -> _Reply:
    torch.set_num_threads(1)
    start_logging(is_first=task.rank == 0, level=logging.ERROR)
    try:
        size = task.topology.world_size
        if size > 1:
            timeout = timedelta(seconds=task.timeout_s)
            url = f"file://{task.rendezvous}"
            dist.init_process_group("gloo", init_method=url, rank=task.rank, world_size=size, timeout=timeout)
        context = ParallelContext.attach(task.topology, timeout_s=task.timeout_s)
        result = task.function(context, *task.arguments)
        barrier(context.control)  # no rank exits while another one still reads from it
        return _Reply(result)
    except NanotrainError as error:
        return _Reply(error=error)
    except Exception:
        return _Reply(traceback=f"rank {task.rank}: {traceback.format_exc()}")
