"""Law L3 for restarts in place: a run with a fault of one rank goes on in the processes of the other
ranks, and ends as if nothing had happened, to the bit. Where the rank leaves it ends as one that was
stopped, and started again with fewer ranks.
"""

import functools
import glob
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import PrefixStore

from nanotrain.checkpoint import background
from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.cli.launch import print_verdict
from nanotrain.comm.generation_store import GenerationStore
from nanotrain.comm.generations import PREFIX, SUPERVISED
from nanotrain.config.load import load
from nanotrain.errors import CorruptState
from nanotrain.launch.supervisor import (
    LOCAL,
    Limits,
    Supervisor,
    open_local_store,
    rank_environment,
)
from nanotrain.runs.lock import is_in_use
from nanotrain.system import OF_TORCHRUN
from nanotrain.topology.smaller_world import largest_world
from nanotrain.train import build
from nanotrain.train import fit as trainer
from nanotrain.train import main as entry
from tests.harness import HANG_S, forkserver
from tests.laws.command_line import (
    ForkedRanks,
    arguments,
    assert_same_to_the_bit,
    steps_of,
)
from tests.laws.more_layouts import with_mark

FLAGS = "--train-iters 8 --save-interval 4 --data-parallel-sharding-strategy optim_grads --overlap-grad-reduce"
IN_PLACE = "--inprocess-restart"
MAX_RESTARTS = 10
pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Trouble:
    """What befalls a rank, each time that it is in a generation of `generations`."""

    how: str  # kill, stop, raise, or differ: an error that all ranks raise
    rank: int = 1
    step: int = 6
    where: str = "step"  # step, restore, memory save, or disk save in the background
    generations: Sequence[int] = (0,)
    after: Path | None = None  # a file that is there before

    def strike(self) -> None:
        """End or stop this process, or raise an error."""
        while self.after is not None and not glob.glob(str(self.after)):
            time.sleep(0.01)
        if self.how == "raise":
            raise ValueError("a bit of bad luck")
        if self.how == "differ":
            raise CorruptState("replicas differ")
        os.kill(os.getpid(), signal.SIGKILL if self.how == "kill" else signal.SIGSTOP)


def make_trouble(troubles: Sequence[Trouble], rank: int) -> None:
    """Have troubles befall this rank."""
    train_step = trainer.train_step_with_repeats
    restore = build.restore
    copy = background.StagingBuffers.copy
    write = Checkpointer._write
    newest: dict[str, int] = {"generation": -1, "step": 0}

    def meets(where: str) -> None:
        for trouble in troubles:
            is_there = (trouble.where, trouble.rank) == (where, rank)
            is_time = where != "step" or newest["step"] == trouble.step
            is_time = is_time and ("save" not in where or newest["step"] >= trouble.step)
            if is_there and is_time and newest["generation"] in trouble.generations:
                trouble.strike()

    def step(run: Any, batch: Any, **options: Any) -> Any:
        newest.update(generation=run.context.generation.number, step=run.state.step + 1)
        meets("step")
        return train_step(run, batch, **options)

    def restored(*args: Any, **options: Any) -> Any:
        newest["generation"] = options["model"].context.generation.number
        result = restore(*args, **options)
        meets("restore")
        return result

    def copied(*args: Any, **options: Any) -> Any:
        meets("memory save")
        return copy(*args, **options)

    def written(*args: Any, **options: Any) -> Any:
        meets("disk save")
        return write(*args, **options)

    Checkpointer._write = written  # type: ignore[method-assign]
    trainer.train_step_with_repeats = step
    build.restore = restored
    background.StagingBuffers.copy = copied


def _run_rank(
    line: Sequence[str], environment: dict[str, str], output: Path, troubles: Sequence[Trouble]
) -> None:
    os.environ |= environment
    with output.open("a") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    entry.WAIT_FOR_FIRST_RANK_S = HANG_S
    make_trouble(troubles, int(environment["RANK"]))
    try:
        code = entry.main(line)
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Forked:
    """A rank that was forked from the server of the harness, as `subprocess.Popen`."""

    def __init__(self, process: Any) -> None:
        self._process = process
        process.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it has ended
            os.kill(self.pid, number)


@dataclass
class Job:
    """The ranks of a run under the launcher that starts one of them again."""

    run: Path
    num_ranks: int = 2
    is_supervised: bool = True  # False: torchrun's agent is the launcher
    failed: dict[int, int] = field(default_factory=dict)  # exit codes
    started: list[int] = field(default_factory=list)  # ranks, in the order of their starts

    @property
    def log(self) -> Path:
        return self.run.with_suffix(".log")

    @property
    def output(self) -> str:
        return self.log.read_text()

    @property
    def restarts(self) -> list[dict[str, Any]]:
        path = self.run / "restarts.jsonl"
        return [json.loads(row) for row in path.read_text().splitlines()] if path.exists() else []

    @property
    def starts(self) -> list[dict[str, Any]]:
        return [json.loads(row) for row in (self.run / "starts.jsonl").read_text().splitlines()]

    def train(self, line: Sequence[str], *troubles: Trouble) -> "Job":
        store = open_local_store(0)
        address = (LOCAL, store.port)

        def start(rank: int) -> Forked:
            self.started.append(rank)
            environment = rank_environment(rank, self.num_ranks, address=address)
            del environment[OF_TORCHRUN]  # the server of the harness is the parent
            if not self.is_supervised:
                del environment[SUPERVISED]
            process_args = (line, environment, self.log, troubles)
            return Forked(forkserver().Process(target=_run_rank, args=process_args))

        supervisor = Supervisor(
            GenerationStore(PrefixStore(PREFIX, store)),
            self.num_ranks,
            start=start,
            limits=Limits(MAX_RESTARTS, functools.partial(largest_world, load(line).config)),
        )
        limit = threading.Timer(HANG_S, self._kill, args=[supervisor])
        limit.start()
        try:
            self.failed = supervisor.run()
        finally:
            limit.cancel()
        return self

    @staticmethod
    def _kill(supervisor: Supervisor) -> None:
        for process in supervisor.processes.values():
            process.send_signal(signal.SIGKILL)


MEMORY = "--memory-checkpoint-interval 2 --memory-checkpoint-dir"
KILLED, STOPPED, RAISED = Trouble("kill"), Trouble("stop"), Trouble("raise")
TWO_BY_TWO = "--tensor-model-parallel-size 2 --sequence-parallel"
# ranks, flags, troubles, ranks that are started again, steps from which the run goes on
CASES = {
    "a rank is killed": (2, "", [KILLED], [1], [4]),
    "killed again while it restores": (
        2,
        "",
        [KILLED, Trouble("kill", rank=0, where="restore", generations=(1,))],
        [1, 0],
        [4],
    ),
}
MORE_CASES = {
    "the first rank is killed": (2, "", [Trouble("kill", rank=0)], [0], [4]),
    "a rank raises an error": (2, "", [RAISED], [], [4]),
    "a rank is stopped": (2, "--hang-timeout-s 2", [STOPPED], [1], [4]),
    "one of four is killed": (4, TWO_BY_TWO, [Trouble("kill", rank=2)], [2], [4]),
    "before the first save": (2, "", [Trouble("kill", step=2)], [1], [0]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs, which have one corpus."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Callable[[int, str], Path]:
    """The folder of a run that nothing befell, on ranks that are processes too."""

    @functools.cache
    def reference(num_ranks: int, flags: str) -> Path:
        run = folder / f"reference-{num_ranks}"
        output = folder / f"output-{num_ranks}"
        output.mkdir()
        line = arguments(run, FLAGS, flags)
        finished = ForkedRanks(line, folder=output, num_ranks=num_ranks).wait()
        assert finished.exit_code == 0, finished.output
        return run

    return reference


@pytest.mark.parametrize("case", [*CASES, *with_mark(MORE_CASES)])
def test_a_run_with_a_fault_of_one_rank_ends_as_if_nothing_had_happened(
    folder: Path, reference: Callable[[int, str], Path], case: str
) -> None:
    num_ranks, flags, troubles, started, steps = (CASES | MORE_CASES)[case]
    job = Job(folder / case.replace(" ", "-"), num_ranks)
    job.train(arguments(job.run, FLAGS, IN_PLACE, flags), *troubles)
    assert not job.failed, job.output
    assert job.started == [*range(num_ranks), *started], "only these were started again"
    assert [row["step"] for row in job.restarts] == steps, job.output
    assert_same_to_the_bit(job.run, reference(num_ranks, flags if num_ranks > 2 else ""))


AGAIN = (0, 1)  # generations
# ranks, flags, troubles, ranks that are started again, ranks that go on
LEAVES = {"the first of three leaves": (3, "", [Trouble("kill", 0, generations=AGAIN)], [0], 2)}
MORE_LEAVES = {
    "one of three leaves": (3, "", [Trouble("kill", 1, generations=AGAIN)], [1], 2),
    "a replica of two leaves": (4, TWO_BY_TWO, [Trouble("kill", 2, generations=AGAIN)], [2], 2),
    "the first rank of a replica leaves": (
        4,
        TWO_BY_TWO,
        [Trouble("kill", 0, generations=AGAIN)],
        [0],
        2,
    ),
    "another one dies afterwards": (
        3,
        "",
        [Trouble("kill", 0, generations=AGAIN), Trouble("kill", 1, step=7, generations=(2,))],
        [0, 1],
        2,
    ),
    "two of three leave": (
        3,
        "",
        [Trouble("kill", 0, generations=AGAIN), Trouble("kill", 1, generations=(2, 3))],
        [0, 1],
        1,
    ),
    "its replacement dies while it restores": (
        3,
        "",
        [Trouble("kill"), Trouble("kill", where="restore", generations=(1,))],
        [1],
        2,
    ),
}


@pytest.mark.parametrize("case", [*LEAVES, *with_mark(MORE_LEAVES)])
def test_ranks_go_on_without_one_that_leaves_as_after_a_start_with_fewer(
    folder: Path, reference: Callable[[int, str], Path], case: str
) -> None:
    num_ranks, flags, troubles, started, num_staying = (LEAVES | MORE_LEAVES)[case]
    expected = stopped_and_started(folder, case, ranks=(num_ranks, num_staying), flags=flags)
    job = Job(folder / case.replace(" ", "-"), num_ranks)
    min_ranks = f"{IN_PLACE} --inprocess-min-ranks 1"
    job.train(arguments(job.run, FLAGS, min_ranks, flags), *troubles)
    assert not job.failed, job.output
    assert job.started == [*range(num_ranks), *started]
    assert job.restarts[-1]["ranks"] == num_staying and job.restarts[-1]["step"] == 4
    assert_same_to_the_bit(job.run, expected)
    losses = [row["loss"] for row in steps_of(reference(num_ranks, flags))]
    assert [row["loss"] for row in steps_of(job.run)] == pytest.approx(losses, rel=1e-6)
    assert [start["world_size"] for start in job.starts][-1] == num_staying
    assert not is_in_use(job.run)


@pytest.mark.more_layouts
def test_ranks_go_on_without_one_that_leaves_from_the_checkpoint_in_memory(
    folder: Path, tmp_path: Path
) -> None:
    expected = stopped_and_started(folder, "memory", ranks=(3, 2), flags="", step=6)
    job = Job(folder / "leaves-memory", 3)
    line = arguments(job.run, FLAGS, f"{IN_PLACE} --inprocess-min-ranks 2 {MEMORY} {tmp_path}")
    in_memory = tmp_path / "*/*/*/step-00000006/manifest.json"
    job.train(line, Trouble("kill", 1, step=7, generations=AGAIN, after=in_memory))
    assert not job.failed, job.output
    # the generation between has not completed a step
    assert [(row["step"], row["ranks"]) for row in job.restarts] == [(6, 2)], job.output
    assert job.output.count("resuming from memory: step-00000006, 3 of 3 shards") == 2
    assert_same_to_the_bit(job.run, expected)


def stopped_and_started(
    folder: Path, name: str, *, ranks: tuple[int, int], flags: str, step: int = 4
) -> Path:
    """The folder of a run that was stopped after a step, and started again with fewer ranks."""
    run = folder / f"stopped-{name.replace(' ', '-')}"
    for number, num_ranks in enumerate(ranks):
        output = folder / f"{run.name}-{number}"
        output.mkdir()
        line = arguments(run, FLAGS, flags, "" if number else f"--exit-interval {step}")
        finished = ForkedRanks(line, folder=output, num_ranks=num_ranks).wait()
        assert finished.exit_code == 0, finished.output
    return run


def test_a_rank_that_dies_in_a_save_to_memory_goes_on_from_the_save_before(
    folder: Path, tmp_path: Path, reference: Callable[[int, str], Path]
) -> None:
    job = Job(folder / "memory")
    line = arguments(job.run, FLAGS, IN_PLACE, f"{MEMORY} {tmp_path}")
    job.train(line, Trouble("kill", where="memory save"))
    assert not job.failed, job.output
    assert job.started == [0, 1, 1]
    assert [row["step"] for row in job.restarts] == [4]
    assert "resuming from memory: step-00000004" in job.output, job.output
    assert_same_to_the_bit(job.run, reference(2, ""))


def test_the_last_step_is_saved_where_only_the_memory_of_the_hosts_has_it(
    folder: Path, tmp_path: Path, reference: Callable[[int, str], Path]
) -> None:
    job = Job(folder / "last")
    line = arguments(job.run, FLAGS, IN_PLACE, f"--async-save {MEMORY} {tmp_path}")
    in_memory = tmp_path / "*/*/*/step-00000008/manifest.json"
    job.train(line, Trouble("kill", step=8, where="disk save", after=in_memory))
    assert not job.failed, job.output
    assert job.started == [0, 1, 1]
    assert "resuming from memory: step-00000008" in job.output, job.output
    assert_same_to_the_bit(job.run, reference(2, ""))
    assert not list(tmp_path.iterdir()), "the folders in memory are removed"


def test_an_error_that_comes_twice_in_one_step_ends_the_run_with_its_verdict(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    twice = Trouble("raise", generations=range(MAX_RESTARTS))
    job = Job(folder / "twice")
    job.train(arguments(job.run, FLAGS, IN_PLACE), twice)
    assert (job.failed, job.started) == ({1: 1}, [0, 1]), job.output
    assert [row["step"] for row in job.restarts] == [4]
    print_verdict(job.run, job.failed, since_s=0.0)
    assert "verdict: stop: rank 1: ValueError: a bit of bad luck" in capfd.readouterr().err


@pytest.mark.more_layouts
def test_an_error_of_all_ranks_has_its_verdict_though_the_first_one_has_left(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = Job(folder / "differ", 3)
    differ = [Trouble("differ", rank, step=7, generations=(2,)) for rank in (1, 2)]
    line = arguments(job.run, FLAGS, f"{IN_PLACE} --inprocess-min-ranks 1")
    job.train(line, Trouble("kill", 0, generations=AGAIN), *differ)
    assert job.failed == {1: 2}, job.output  # the other one waits for its message
    print_verdict(job.run, job.failed, since_s=0.0)
    verdict = capfd.readouterr().err.splitlines()[-1]
    assert verdict.startswith("verdict: restart: from the newest checkpoint"), verdict
    assert verdict.endswith("CorruptState: replicas differ")


@pytest.mark.more_layouts
@pytest.mark.parametrize("num_ranks", [1, 2])  # one that is killed leaves no departure
def test_a_rank_that_dies_again_and_again_without_a_new_step_ends_the_run(
    folder: Path, num_ranks: int
) -> None:
    last = num_ranks - 1
    always = Trouble("kill", rank=last, generations=range(MAX_RESTARTS))
    job = Job(folder / f"always-{num_ranks}", num_ranks)
    job.train(arguments(job.run, FLAGS, IN_PLACE), always)
    assert job.started == [*range(num_ranks), last, last, last], job.output
    assert job.failed[0] == 2, job.output
    assert f"no further restart in place: 3 faults without a new step: rank {last}" in job.output


@pytest.mark.more_layouts
def test_an_error_in_a_job_of_torchrun_is_restarted_in_place(
    folder: Path, reference: Callable[[int, str], Path]
) -> None:
    job = Job(folder / "torchrun", is_supervised=False)
    job.train(arguments(job.run, FLAGS, IN_PLACE), RAISED)
    assert not job.failed, job.output
    assert "torchrun ends all ranks where one dies, so that no rank leaves" in job.output
    assert_same_to_the_bit(job.run, reference(2, ""))
