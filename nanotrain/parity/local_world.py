"""`run_ranks` runs a function on every rank of a new world of processes on this machine, without torchrun.

    fork server (torch imported once) -> ranks 0 .. n-1 -> a file -> gloo groups -> function(context, ...) -> files

Ranks are CPU processes with one thread each. The first rank that fails ends all others, and its error is raised in the
caller.
"""

import logging
import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from nanotrain.comm.collectives import barrier
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.errors import EnvironmentFault, NanotrainError
from nanotrain.log import start_logging
from nanotrain.topology.topology import Topology

# A rank that lost its peer fails this much later, so that the failure of the peer is found first.
SECOND_FAILURE_S = 1.0
REFUSED = 2  # exit code of a rank that has written its error


@dataclass(frozen=True)
class _Task:
    """What every rank runs."""

    topology: Topology
    folder: Path  # of the rendezvous, and of one file per rank: its result or its error
    timeout_s: float
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def run_ranks(
    topology: Topology, function: Callable[..., Any], *, arguments: Sequence[Any] = (), timeout_s: float = 300.0
) -> list[Any]:
    """Call `function(context, *arguments)` on every rank of a new world of local CPU processes.

    Args:
        topology: topology of the world.
        function: a module-level function; its arguments and results must be picklable.
        arguments: arguments of every rank.
        timeout_s: how long a collective waits for a slow or lost rank.

    Returns:
        The results, by rank.

    Raises:
        NanotrainError: the error of the first failing rank.
        EnvironmentFault: a rank died.
        RuntimeError: another error of a rank; its traceback is the message.
    """
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host name may not resolve
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", function.__module__])
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # names each rank that it ends
    with TemporaryDirectory(prefix="nanotrain-ranks-") as folder:
        task = _Task(topology, Path(folder), timeout_s, function, tuple(arguments))
        try:
            start_processes(_run_rank, (task,), topology.world_size, daemon=True, start_method="forkserver")
        except ProcessRaisedException as error:
            raise RuntimeError(f"rank {error.error_index}: {str(error).partition(':')[2].strip()}") from None
        except ProcessExitedException as error:
            if error.exit_code == REFUSED:
                raise _read(task, error.error_index) from None
            why, fix = "usually the machine ran out of memory", "run on fewer ranks or free memory"
            raise EnvironmentFault(f"rank {error.error_index} died", why=why, fix=fix) from None
        return [_read(task, rank) for rank in range(topology.world_size)]


def _read(task: _Task, rank: int) -> Any:
    """What a rank has written."""
    return pickle.loads((task.folder / str(rank)).read_bytes())


def _run_rank(rank: int, task: _Task) -> None:
    """Run one rank in this process, write its result or its error, and exit."""
    torch.set_num_threads(1)
    start_logging(is_first=rank == 0, level=logging.ERROR)
    try:
        size, timeout = task.topology.world_size, timedelta(seconds=task.timeout_s)
        if size > 1:
            url = f"file://{task.folder / 'rendezvous'}"
            dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size, timeout=timeout)
        context = ParallelContext.attach(task.topology, timeout_s=task.timeout_s)
        result, code = task.function(context, *task.arguments), 0
        barrier(context.control)  # no rank exits while another one still reads from it
    except NanotrainError as error:
        result, code = error, REFUSED
        if isinstance(error, EnvironmentFault):
            time.sleep(SECOND_FAILURE_S)
    (task.folder / str(rank)).write_bytes(pickle.dumps(result))
    os._exit(code)  # skip the teardown of the interpreter and of gloo, which takes longer than most checks
