"""Run a test on n local ranks; each rank gets its `ParallelContext` as the first argument.

    @ranks(4, tp=2, strategy="optim")            run_ranks(4, train_a_bit, seed, strategy="optim")
    def test_something(ctx): ...                 -> the results of train_a_bit(ctx, seed), by rank

    ranks, run_ranks      the interface for tests
    Reply                 the message from a rank to the test
    _gather_replies       wait for all ranks, kill those that hang, report the first failure
    _run_rank             the rank's side

All ranks are threads of one process (thread_world.py), or with `threads=False` processes over gloo.
Processes are forked from a server that has imported torch but not used it, so four ranks cost 0.2
s. Their rendezvous is a file, so no port is needed. Each has one OpenMP thread (forked children
with more hang).
"""

import faulthandler
import functools
import importlib.util
import inspect
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

from nanotrain.config.parallel import ParallelConfig
from nanotrain.errors import EnvironmentFault

SHORT_NAMES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "vpp": "num_virtual_stages_per_pipeline_rank",
    "schedule": "pipeline_schedule",  # which places the stages
    "instances": "num_distributed_optimizer_instances",
    "strategy": "data_parallel_sharding_strategy",
}
PRELOADED = [
    *("torch", "torch.distributed", "pytest", "hypothesis", "numpy", "s3fs"),
    *("nanotrain.train.open_run", "nanotrain.config.compose", "tests.harness"),
    # most worlds are theirs
    *("tests.laws.worlds", "tests.laws.command_line", "tests.thread_world"),
    "transformers.models.llama.modeling_llama",  # and what all its models import: 1.2 s
    # and what compiling imports: 0.7 s
    *("torch._functorch.aot_autograd", "torch._inductor.pattern_matcher"),
    # torch's optimizers import it when the first one is created: 1 to 5 s on every rank
    "torch._dynamo",
    "tests.server_start",  # the last, as it sets aside what was imported
]
ROOT = Path(__file__).parents[1]
# Bounds a hang. A busy machine is many times slower than an idle one, so no limit of a test is near
# what it needs.
HANG_S = 300.0
_SECOND_FAILURE_S = 10.0  # how long to wait for the other ranks after the first failure
# how long a child may take to write its stacks and end after its time is over
_ENDS_ITSELF_S = 60.0
# a rank that hangs in a collective is killed before, and its stack reported
_COLLECTIVES_S = 2 * HANG_S
_BEGINS = b""  # the message of a rank that has joined its world


def ranks(
    num_ranks: int,
    *,
    timeout_s: float = HANG_S,
    threads: bool = True,
    shares: bool = False,
    **parallel_options: Any,
) -> Callable[..., Any]:
    """Run the decorated test on `num_ranks` ranks; its first argument is that rank's
    `ParallelContext`.

    Args:
        num_ranks: size of the world.
        timeout_s: as for `run_ranks`.
        threads, shares: as for `run_ranks`.
        parallel_options: fields of ParallelConfig, or their short names (tp, pp, cp, ep, etp,
            instances, strategy).
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        ctx, *fixtures = inspect.signature(test).parameters.values()
        assert ctx.name == "ctx", "the first argument is the rank's context"

        @functools.wraps(test)
        def on_every_rank(**fixture_values: Any) -> None:
            run = functools.partial(
                run_ranks, timeout_s=timeout_s, threads=threads, shares=shares, **parallel_options
            )
            run(num_ranks, test, *(fixture_values[fixture.name] for fixture in fixtures))

        on_every_rank.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]
        return on_every_rank

    return decorate


def run_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = HANG_S,
    threads: bool = True,
    shares: bool = False,
    **parallel_options: Any,
) -> list[Any]:
    """Call `function(ctx, *args)` on every rank of a new world.

    Args:
        num_ranks: size of the world.
        function: a module-level function; results and arguments must be picklable.
        args: the same for every rank.
        timeout_s: ranks that have not finished so long after the last of them began are killed and
            reported.
        threads: ranks are threads of one process (tests/thread_world.py): several times cheaper
            than processes over gloo, and the same arithmetic. False for what concerns processes,
            signals or gloo itself.
        shares: the process of the threads runs other worlds before and after, which spares 0.07 s:
            for a function that leaves nothing behind, as a patch of a module.
        parallel_options: as for `ranks`.

    Returns:
        The results, by rank.
    """
    parallel = parallel_config(**parallel_options)
    file = inspect.getfile(inspect.unwrap(function))
    with tempfile.TemporaryDirectory(prefix="nanotrain-ranks-") as folder:
        world = _World(
            num_ranks, timeout_s, folder, file, function.__module__, function.__qualname__
        )
        payload = pickle.dumps((parallel, args))
        if shares:
            # a test may end all children
            _IDLE[:] = [child for child in _IDLE if child.process.is_alive()]
            children = [_IDLE.pop() if _IDLE else _start(_run_worlds)]
            children[0].pipe.send((world, payload))
        elif threads and num_ranks > 1:
            children = [_start(_run_ranks_in_threads, world, payload)]
        else:
            children = [_start(_run_rank, world, rank, payload) for rank in range(num_ranks)]
        try:
            replies = _gather_replies(children, world)
            if shares:
                _IDLE.append(children.pop())
        finally:
            for child in children:
                child.process.kill()
                child.process.join()
                child.process.close()
                child.pipe.close()
    return [pickle.loads(reply.result) for reply in replies]


def parallel_config(**options: Any) -> ParallelConfig:
    """A ParallelConfig from short or full field names.

    >>> parallel_config(tp=2, strategy="optim").tensor_model_parallel_size
    2
    """
    fields = {SHORT_NAMES.get(name, name): value for name, value in options.items()}
    return replace(ParallelConfig(), **fields)


@dataclass(frozen=True)
class Reply:
    """The message from a rank to the test."""

    # result, skip, failure, hang, or peer_failure for an error that another rank's failure causes
    kind: str
    coords: str = ""  # coordinates of the rank, "dp1 tp0"
    text: str = ""  # reason or traceback
    result: bytes = b""  # pickled


@dataclass(frozen=True)
class _World:
    """The arguments of every rank's process; the function is passed as file and name."""

    size: int
    timeout_s: float
    folder: str
    file: str
    module: str
    name: str

    def stack_file(self, rank: int) -> Path:
        return Path(self.folder) / f"rank{rank}.stack"


@dataclass(frozen=True)
class _Child:
    process: Any
    pipe: Connection


_IDLE: list[_Child] = []  # processes of worlds that ended well


@functools.cache
def forkserver() -> Any:
    """The process that all ranks are forked from; started by the first test that needs it."""
    # Read when the server starts; its children inherit the settings.
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", GLOO_SOCKET_IFNAME="lo")
    old = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([old] if old else [])])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _start(target: Callable[..., None], *args: Any) -> _Child:
    ours, theirs = forkserver().Pipe()
    # of a test's server of objects; the others are those of the forkserver's start
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    process = forkserver().Process(
        target=_run_and_exit, args=(environment, target, *args, theirs), daemon=True
    )
    process.start()
    theirs.close()
    return _Child(process, ours)


def _gather_replies(children: list[_Child], world: _World) -> list[Reply]:
    """Every rank's reply; fails the test at the first failure, exit or timeout. A child replies for
    one rank or all.
    """
    replies: dict[int, Reply] = {}
    # to start and to join; `timeout_s` counts from then on
    deadline = time.monotonic() + HANG_S + _ENDS_ITSELF_S
    failed: list[int] = []  # ranks in the order in which they failed
    while len(replies) < world.size:
        running = {child.pipe: rank for rank, child in enumerate(children) if rank not in replies}
        if not running:  # ranks that are threads of a child that ended
            break
        ready = multiprocessing.connection.wait(
            running, timeout=max(0.0, deadline - time.monotonic())
        )
        if not ready and not failed:
            _fail_hung(sorted(running.values()), world)
        if not ready:
            break
        for pipe in ready:
            first = running[pipe]  # type: ignore[index]
            reply = _receive(children[first], world.stack_file(first))
            if reply is None:
                deadline = (
                    deadline if failed else time.monotonic() + world.timeout_s + _ENDS_ITSELF_S
                )
                continue
            received = dict(enumerate(reply, first))
            replies |= received
            failed += [rank for rank, reply in received.items() if reply.kind != "result"]
        if any(replies[rank].kind != "hang" for rank in failed):
            deadline = min(deadline, time.monotonic() + _SECOND_FAILURE_S)
    kinds = {replies[rank].kind for rank in failed}
    if "hang" in kinds <= {"hang", "peer_failure"}:
        ended = {rank for rank in replies if replies[rank].kind != "hang"}
        _fail_hung(sorted(set(range(len(children))) - ended), world)
    if failed:
        _fail_with(failed, replies, world)
    return [replies[rank] for rank in range(world.size)]


def _receive(child: _Child, stack_file: Path) -> list[Reply] | None:
    """The replies of a child; None if one of its ranks begins."""
    try:
        message = child.pipe.recv_bytes()
        return None if message == _BEGINS else pickle.loads(message)
    except EOFError:
        child.process.join(timeout=HANG_S)
        # complete: it ends after it has written its stacks
        if stack_file.exists() and stack_file.stat().st_size:
            return [Reply("hang")]
        return [
            Reply("failure", text=f"exited with code {child.process.exitcode} and sent no reply")
        ]


def _fail_with(failed: list[int], replies: dict[int, Reply], world: _World) -> NoReturn:
    first = next((rank for rank in failed if replies[rank].kind != "peer_failure"), failed[0])
    cause = replies[first]
    if cause.kind == "skip":
        pytest.skip(cause.text)
    coords = f" ({cause.coords})" if cause.coords else ""
    others = ", ".join(str(rank) for rank in sorted(failed) if rank != first)
    and_others = f"\nalso failed: rank {others}" if others else ""
    if cause.kind == "peer_failure":  # none of them has the cause, which may be any rank's
        and_others = "".join(
            f"\nrank {rank}: {replies[rank].text}" for rank in failed if rank != first
        )
    pytest.fail(f"rank {first}{coords} of {world.size}: {cause.text}{and_others}", pytrace=False)


def _fail_hung(hung: list[int], world: _World) -> NoReturn:
    stacks = []
    for rank in hung:
        with suppress(OSError):
            stacks.append(f"stack of rank {rank}\n{world.stack_file(rank).read_text()}")
    numbers = ", ".join(map(str, hung))
    message = (
        f"rank {numbers} of {world.size} did not finish within {world.timeout_s:g} s and was killed"
    )
    pytest.fail("\n".join([message, *stacks]), pytrace=False)


def _run_and_exit(environment: dict[str, str], run: Callable[..., None], *args: Any) -> None:
    """The main function of a process of ranks."""
    os.environ.update(environment)
    run(*args)
    # skip the teardown of the interpreter and of gloo, which takes longer than most tests
    os._exit(0)


def _run_worlds(pipe: Connection) -> None:
    """Run the worlds that the test process sends, one after the other, from the same random state."""
    import torch  # a server that another test has started may not have it

    while True:
        world, payload = pipe.recv()
        torch.manual_seed(0)
        run = (
            partial(_run_rank, world, 0)
            if world.size == 1
            else partial(_run_ranks_in_threads, world)
        )
        run(payload, pipe)


def _run_rank(world: _World, rank: int, payload: bytes, pipe: Connection) -> None:
    """Run one rank in this process and send its reply."""
    _send(world, rank, lambda begin: [_reply(world, rank, payload, begin=begin)], pipe)


def _run_ranks_in_threads(world: _World, payload: bytes, pipe: Connection) -> None:
    """Run all ranks in this process and send their replies."""
    from tests.thread_world import run_in_threads

    # Threads that hand the interpreter to one another from core to core spend half of their time in
    # the kernel.
    cores = sorted(os.sched_getaffinity(0))
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    # of several pytests side by side each has another parent of its ranks
    number = int(worker) if worker else os.getppid()
    os.sched_setaffinity(0, {cores[number % len(cores)]})
    _load(world.module, world.file)  # once, before the threads ask for it

    def run(rank: int, begin: Callable[[], None]) -> tuple[Reply, bool]:
        reply = _reply(world, rank, payload, begin=begin, joins=False)
        return reply, reply.kind == "result"

    _send(world, 0, lambda begin: run_in_threads(world.size, partial(run, begin=begin)), pipe)


def _send(
    world: _World, rank: int, run: Callable[[Callable[[], None]], list[Reply]], pipe: Connection
) -> None:
    """Send what `run` returns; it is given what each rank calls when it begins."""
    tempfile.tempdir = world.folder  # what the ranks make is removed with it
    sending = threading.Lock()
    with world.stack_file(rank).open("w") as stack_file:

        def begin() -> None:
            with sending:
                faulthandler.dump_traceback_later(world.timeout_s, file=stack_file, exit=True)
                pipe.send_bytes(_BEGINS)

        faulthandler.dump_traceback_later(HANG_S, file=stack_file, exit=True)
        replies = pickle.dumps(run(begin))
        faulthandler.cancel_dump_traceback_later()
        pipe.send_bytes(replies)


def _reply(
    world: _World, rank: int, payload: bytes, *, begin: Callable[[], None], joins: bool = True
) -> Reply:
    """Call `begin` and the function on this rank; `joins`: after joining the world over gloo."""
    coords = ""
    try:
        import torch
        import torch.distributed as dist

        from nanotrain.comm.collectives import barrier
        from nanotrain.comm.parallel_context import ParallelContext
        from nanotrain.topology.topology import Topology
        from tests.tensor_pickle import pickled

        torch.set_num_threads(1)
        function = getattr(_load(world.module, world.file), world.name)
        parallel, args = pickle.loads(payload)
        if joins and world.size > 1:
            timeout = timedelta(seconds=_COLLECTIVES_S)
            url = f"file://{world.folder}/rendezvous"
            dist.init_process_group(
                "gloo", init_method=url, rank=rank, world_size=world.size, timeout=timeout
            )
        ctx = ParallelContext.attach(Topology.of(parallel, world.size), timeout_s=_COLLECTIVES_S)
        coords = ctx.coords_text
        begin()
        result = pickled(inspect.unwrap(function)(ctx, *args))
        barrier(ctx.control)  # no rank exits while another one still reads from it
        return Reply("result", coords, result=result)
    except pytest.skip.Exception as skip:
        return Reply("skip", coords, str(skip))
    except BaseException as error:
        is_caused = isinstance(error, EnvironmentFault) or type(error).__name__ == "Abandoned"
        return Reply("peer_failure" if is_caused else "failure", coords, _traceback(error))


def _traceback(error: BaseException) -> str:
    """The traceback without the frames of this file."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))


def _load(name: str, file: str) -> ModuleType:
    """The module of that name, loaded from that file unless it is loaded already."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, f"{file} is not a Python module"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
