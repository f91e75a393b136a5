"""`run_local_ranks`: run a function on every rank of a new world of CPU processes.

Each process has one thread; torchrun is not needed. The first rank that fails ends all others, and
its error is raised in the caller.
"""

import logging
import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from nanotrain.comm.collectives import barrier
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.data.worker import without_main_module
from nanotrain.errors import EnvironmentFault, NanotrainError
from nanotrain.log import start_logging
from nanotrain.system import describe_exit
from nanotrain.topology.topology import Topology

# A rank that lost its peer fails this much later, so that the failure of the peer is found first.
SECOND_FAILURE_S = 1.0
TIMEOUT_S = 300.0  # timeout of a collective that waits for a slow or lost rank
REFUSED = 2  # exit code of a rank that has written its error


def run_local_ranks(
    topology: Topology, function: Callable[..., Any], *, arguments: Sequence[Any] = ()
) -> list[Any]:
    """Call `function(context, *arguments)` on every rank of a new world of local CPU processes.

    Args:
        topology: topology of the world.
        function: module-level function, whose arguments and results must be picklable.
        arguments: arguments of every rank.

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
    # names each rank that it ends
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    with TemporaryDirectory(prefix="nanotrain-ranks-") as name:
        folder = Path(name)  # one file per rank: its result or its error
        task = partial(
            _run_rank,
            folder=folder,
            topology=topology,
            function=function,
            arguments=list(arguments),
        )
        try:
            with _main_module(function):
                ranks = start_processes(
                    task,
                    (),
                    topology.world_size,
                    daemon=True,
                    start_method="forkserver",
                    join=False,
                )
            while not ranks.join():
                pass
        except ProcessRaisedException as error:
            traceback = str(error).partition(":")[2].strip()
            raise RuntimeError(f"rank {error.error_index}: {traceback}") from None
        except ProcessExitedException as error:
            if error.exit_code == REFUSED:
                raise _load_result(folder, error.error_index) from None
            raise EnvironmentFault(
                f"rank {error.error_index} died",
                why=describe_exit(error.exit_code),
                fix="run on fewer ranks or free memory",
            ) from None
        return [_load_result(folder, rank) for rank in range(topology.world_size)]


def _main_module(function: Callable[..., Any]) -> AbstractContextManager[None]:
    """Around the start of processes, which import the main module only for a function of it."""
    return nullcontext() if function.__module__ == "__main__" else without_main_module()


def _load_result(folder: Path, rank: int) -> Any:
    """The result or the error of a rank."""
    return pickle.loads((folder / str(rank)).read_bytes())


def _run_rank(
    rank: int,
    *,
    folder: Path,
    topology: Topology,
    function: Callable[..., Any],
    arguments: list[Any],
) -> None:
    """Run one rank in this process, write its result or its error, and exit."""
    torch.set_num_threads(1)
    start_logging(is_first=rank == 0, level=logging.ERROR)
    code = 0
    try:
        if topology.world_size > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder / 'rendezvous'}",
                rank=rank,
                world_size=topology.world_size,
                timeout=timedelta(seconds=TIMEOUT_S),
            )
        context = ParallelContext.attach(topology, timeout_s=TIMEOUT_S)
        result = function(context, *arguments)
        barrier(context.control)  # no rank exits while another one still reads from it
    except NanotrainError as error:
        result = error
        code = REFUSED
        if isinstance(error, EnvironmentFault):
            time.sleep(SECOND_FAILURE_S)
    (folder / str(rank)).write_bytes(pickle.dumps(result))
    # skip the teardown of the interpreter and of gloo, which takes longer than most checks
    os._exit(code)
