"""Many ranks as an argument: a test gets a live `ParallelContext` on each of n processes.

    @ranks(4, tp=2, strategy="optim")            run_ranks(4, train_a_bit, seed, strategy="optim")
    def test_something(ctx): ...                 -> the four values that train_a_bit(ctx, seed) returned

    ranks, run_ranks      what tests use
    Answer                what one rank sends back
    _gather_answers       wait for all, kill what hangs, tell the failure that came first
    _play_rank            the child's side

Processes are forked from a server that has imported torch once and never used it, so four ranks cost 0.2 s; they meet
through a file, so no port is needed, and run one OpenMP thread each (forked children with more hang).
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
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

from nanotrain.config.config import ParallelConfig, ShardingStrategy
from nanotrain.errors import EnvironmentFault

SHORT_NAMES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "instances": "num_distributed_optimizer_instances",
    "strategy": "data_parallel_sharding_strategy",
}
PRELOADED = [
    *("torch", "torch.distributed", "pytest", "hypothesis", "numpy", "nanotrain.train.build", "tests.harness"),
    "torch._dynamo",  # torch's optimizers import it when the first is made: 1 to 5 s on every rank
]
ROOT = Path(__file__).parents[1]
_DEFAULT_TIMEOUT_S = 60.0
_SECOND_FAILURE_S = 0.5  # how long to look for ranks that failed along with the first


def ranks(num_ranks: int, *, timeout_s: float = _DEFAULT_TIMEOUT_S, **parallel_options: Any) -> Callable[..., Any]:
    """Run the decorated test on `num_ranks` processes; its first argument is that rank's `ParallelContext`.

    Args:
        num_ranks: size of the world.
        timeout_s: after which ranks that have not finished are killed and named.
        parallel_options: fields of ParallelConfig, or their short names (tp, pp, cp, ep, etp, instances, strategy).
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        ctx, *fixtures = inspect.signature(test).parameters.values()
        assert ctx.name == "ctx", "the first argument is the rank's context"

        @functools.wraps(test)
        def on_every_rank(**fixture_values: Any) -> None:
            run = functools.partial(run_ranks, timeout_s=timeout_s, **parallel_options)
            run(num_ranks, test, *(fixture_values[fixture.name] for fixture in fixtures))

        on_every_rank.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]
        return on_every_rank

    return decorate


def run_ranks(
    num_ranks: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = _DEFAULT_TIMEOUT_S,
    **parallel_options: Any,
) -> list[Any]:
    """Call `fn(ctx, *args)` on every rank of a new world.

    Args:
        num_ranks: size of the world.
        fn: a function at the top of a module; results and arguments must be picklable.
        args: passed on to every rank alike.
        timeout_s: after which ranks that have not finished are killed and named.
        parallel_options: as for `ranks`.

    Returns:
        what each rank returned, by rank.
    """
    parallel = parallel_config(**parallel_options)
    home = inspect.getfile(inspect.unwrap(fn))
    with tempfile.TemporaryDirectory(prefix="nanotrain-ranks-") as folder:
        world = _World(num_ranks, timeout_s, folder, home, fn.__module__, fn.__qualname__)
        payload = pickle.dumps((parallel, args))
        children = [_start_rank(world, rank, payload) for rank in range(num_ranks)]
        try:
            answers = _gather_answers(children, world)
        finally:
            for child in children:
                child.process.kill()
                child.process.join()
                child.process.close()
                child.pipe.close()
    return [pickle.loads(answer.value) for answer in answers]


def parallel_config(**options: Any) -> ParallelConfig:
    """A ParallelConfig from short or full field names.

    >>> parallel_config(tp=2, strategy="optim").tensor_model_parallel_size
    2
    """
    fields = {SHORT_NAMES.get(name, name): value for name, value in options.items()}
    strategy = "data_parallel_sharding_strategy"
    if strategy in fields:
        fields[strategy] = ShardingStrategy(fields[strategy])
    return replace(ParallelConfig(), **fields)


@dataclass(frozen=True)
class Answer:
    """What one rank sends back: its kind is "result", "skip", "failure" or, where another rank was lost, "echo"."""

    kind: str
    place: str = ""
    text: str = ""
    value: bytes = b""


@dataclass(frozen=True)
class _World:
    """What every rank of one run is told; the function travels as its file and name."""

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


@functools.cache
def _server() -> Any:
    """The process that all ranks are forked from; started by the first test that needs it."""
    # Read when the server starts. Its OpenMP threads never run, but its children inherit the settings.
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", GLOO_SOCKET_IFNAME="lo")
    old = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([old] if old else [])])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _start_rank(world: _World, rank: int, payload: bytes) -> _Child:
    ours, theirs = _server().Pipe(duplex=False)
    process = _server().Process(target=_play_rank, args=(world, rank, payload, theirs), daemon=True)
    process.start()
    theirs.close()
    return _Child(process, ours)


def _gather_answers(children: list[_Child], world: _World) -> list[Answer]:
    """Every rank's answer; fails the test at the first failure, death or timeout."""
    answers: dict[int, Answer] = {}
    deadline = time.monotonic() + world.timeout_s
    bad: list[int] = []  # ranks in the order in which they failed
    while len(answers) < len(children):
        left = {child.pipe: rank for rank, child in enumerate(children) if rank not in answers}
        ready = multiprocessing.connection.wait(left, timeout=max(0.0, deadline - time.monotonic()))
        if not ready and not bad:
            _fail_hung(sorted(left.values()), world)
        if not ready:
            break
        for pipe in ready:
            rank = left[pipe]  # type: ignore[index]
            answers[rank] = _receive(children[rank])
            if answers[rank].kind != "result":
                bad.append(rank)
        if bad:  # give the others a moment to say whether they failed too
            deadline = min(deadline, time.monotonic() + _SECOND_FAILURE_S)
    if bad:
        _fail_with(bad, answers, world)
    return [answers[rank] for rank in range(world.size)]


def _receive(child: _Child) -> Answer:
    try:
        return pickle.loads(child.pipe.recv_bytes())
    except EOFError:
        child.process.join(timeout=5)
        return Answer("failure", text=f"it died without a word, exit code {child.process.exitcode}")


def _fail_with(bad: list[int], answers: dict[int, Answer], world: _World) -> NoReturn:
    culprit = next((rank for rank in bad if answers[rank].kind != "echo"), bad[0])
    cause = answers[culprit]
    if cause.kind == "skip":
        pytest.skip(cause.text)
    place = f" ({cause.place})" if cause.place else ""
    others = ", ".join(str(rank) for rank in sorted(bad) if rank != culprit)
    and_others = f"\nfailed too: rank {others}" if others else ""
    pytest.fail(f"rank {culprit}{place} of {world.size}: {cause.text}{and_others}", pytrace=False)


def _fail_hung(hung: list[int], world: _World) -> NoReturn:
    stacks = []
    for rank in hung:
        with suppress(OSError):
            stacks.append(f"rank {rank} stood at\n{world.stack_file(rank).read_text()}")
    who = ", ".join(map(str, hung))
    message = f"rank {who} of {world.size} did not finish within {world.timeout_s:g} s and was killed"
    pytest.fail("\n".join([message, *stacks]), pytrace=False)


def _play_rank(world: _World, rank: int, payload: bytes, pipe: Connection) -> None:
    """One rank, in a process of its own: join, run, answer, leave at once."""
    with world.stack_file(rank).open("w") as stack_file:
        faulthandler.dump_traceback_later(max(0.1, world.timeout_s - 0.3), file=stack_file)
        pipe.send_bytes(pickle.dumps(_answer(world, rank, payload)))
        pipe.close()
        os._exit(0)  # nothing to tidy up: interpreter and gloo teardown would cost more than the test


def _answer(world: _World, rank: int, payload: bytes) -> Answer:
    place = ""
    try:
        import torch
        import torch.distributed as dist

        from nanotrain.comm.collectives import barrier
        from nanotrain.comm.parallel_context import ParallelContext
        from nanotrain.topology.topology import Topology

        torch.set_num_threads(1)
        fn = getattr(_load(world.module, world.file), world.name)
        parallel, args = pickle.loads(payload)
        if world.size > 1:
            timeout = timedelta(seconds=world.timeout_s)
            meeting = f"file://{world.folder}/meeting"
            dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world.size, timeout=timeout)
        ctx = ParallelContext.attach(Topology.of(parallel, world.size), timeout_s=world.timeout_s)
        place = ctx.coords_text
        value = pickle.dumps(inspect.unwrap(fn)(ctx, *args))
        barrier(ctx.control)  # nobody leaves while another rank still reads from it
        return Answer("result", place, value=value)
    except pytest.skip.Exception as skip:
        return Answer("skip", place, str(skip))
    except BaseException as error:
        kind = "echo" if isinstance(error, EnvironmentFault) else "failure"
        return Answer(kind, place, _own_traceback(error))


def _own_traceback(error: BaseException) -> str:
    """The traceback below this file's frames."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))


def _load(name: str, file: str) -> ModuleType:
    """The module of that name, read from that file unless it is there already."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, f"{file} is no Python module"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
