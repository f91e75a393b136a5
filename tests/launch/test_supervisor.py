"""The launcher that starts a rank that died again; the ranks here are stand-ins."""

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from nanotrain.comm.generation_store import Decision, Fault, FinalError, GenerationStore
from nanotrain.launch.start_ranks import check_ranks, read_options, reason_for_agent
from nanotrain.launch.supervisor import Limits, RankStarter, Supervisor, rank_environment
from tests.harness import HANG_S


class StandIn:
    """A rank that ends with a code, after a number of polls."""

    def __init__(self, code: int | None, *, polls: int = 0) -> None:
        self.code, self.polls, self.signals = code, polls, list[int]()

    def poll(self) -> int | None:
        self.polls -= 1
        return self.code if self.polls < 0 else None

    def send_signal(self, number: int) -> None:
        self.signals.append(number)
        self.code, self.polls = -number, 0


class Ranks:
    """Starts stand-ins with codes by rank, in the order of their lives."""

    def __init__(self, **codes: Sequence[int | None]) -> None:
        self.store = GenerationStore(dist.HashStore())
        self.codes = {int(name[1:]): list(values) for name, values in codes.items()}
        self.started: list[int] = []
        self.stops: list[int] = []
        self.joins = True
        self.largest_world: Callable[[int], int] = lambda at_most: 0

    def start(self, rank: int) -> StandIn:
        if self.joins:
            self.store.join(self.store.current(), rank)
        self.started.append(rank)
        return StandIn(self.codes[rank].pop(0), polls=len(self.started))

    def run(self, *, max_restarts: int = 3) -> dict[int, int]:
        supervisor = Supervisor(
            self.store,
            len(self.codes),
            start=self.start,
            limits=Limits(max_restarts, self.largest_world),
            stops=self.stops,
        )
        return supervisor.run()


def test_a_rank_that_a_signal_ended_is_started_again_alone(capfd: pytest.CaptureFixture) -> None:
    ranks = Ranks(r0=[0], r1=[-9, -11, 0], r2=[0])
    assert ranks.run() == {}
    assert ranks.started == [0, 1, 2, 1, 1]
    assert ranks.store.current() == 2
    fault = ranks.store.fault(1)
    assert (fault.rank, fault.what, fault.is_death) == (1, "SIGSEGV ended it", True)
    assert "rank 1 is started again: SIGKILL ended it" in capfd.readouterr().err


def test_ranks_that_die_in_one_generation_are_one_restart() -> None:
    ranks = Ranks(r0=[-9, 0], r1=[-9, 0], r2=[-9, 0])
    assert ranks.run(max_restarts=1) == {}
    assert ranks.started == [0, 1, 2, 0, 1, 2]


def test_a_rank_that_dies_before_it_joins_is_started_again_only_so_often() -> None:
    ranks = Ranks(r0=[None], r1=[-9, -9, -9, -9])
    ranks.joins = False
    assert ranks.run(max_restarts=2) == {1: -9}
    assert ranks.started == [0, 1, 1, 1]


def leaving(**codes: Sequence[int | None]) -> Ranks:
    """Ranks of which two may go on alone."""
    ranks = Ranks(**codes)
    ranks.largest_world = lambda at_most: 2 if at_most >= 2 else 0
    return ranks


def members_of(ranks: Ranks) -> tuple[int, ...]:
    return ranks.store.members(ranks.store.current(), len(ranks.codes)).ranks


def test_a_rank_that_dies_again_without_a_new_step_leaves(
    capfd: pytest.CaptureFixture,
) -> None:
    ranks = leaving(r0=[0], r1=[0], r2=[-9, -9], r3=[0])
    assert ranks.run() == {}
    assert ranks.started == [0, 1, 2, 3, 2]
    assert members_of(ranks) == (0, 1), "the last one leaves too, for three form no layout"
    assert ranks.store.members(1, 4).ranks == (0, 1, 2, 3)
    assert "it leaves the run, 2 of 4 ranks go on: 0, 1" in capfd.readouterr().err


def test_a_rank_that_dies_again_after_a_new_step_is_started_again() -> None:
    ranks = leaving(r0=[0], r1=[0], r2=[-9, -9, 0])
    ranks.store.note_new_step(1, 5)
    assert ranks.run() == {}
    assert ranks.started == [0, 1, 2, 2, 2] and members_of(ranks) == (0, 1, 2)


def test_a_new_step_before_the_last_death_does_not_count() -> None:
    ranks = leaving(r0=[0], r1=[0], r2=[-9, -9])
    ranks.store.note_new_step(0, 5)
    assert ranks.run() == {}
    assert ranks.started == [0, 1, 2, 2] and members_of(ranks) == (0, 1)


def test_a_rank_that_leaves_is_one_of_the_restarts() -> None:
    ranks = leaving(r0=[None], r1=[-9, -9], r2=[-9])
    start = ranks.start

    class FollowsOthers(StandIn):
        def poll(self) -> int | None:
            if self.polls == 1:
                ranks.store.join(ranks.store.current(), 2)
            return super().poll()

    def start_follower(rank: int) -> StandIn:
        started = start(rank)
        return FollowsOthers(started.code, polls=30) if rank == 2 else started

    ranks.start = start_follower  # type: ignore[method-assign]
    assert ranks.run(max_restarts=2) == {2: -9}
    assert members_of(ranks) == (0, 2)


@pytest.mark.parametrize("code", [-9, 2])
def test_a_rank_that_does_not_start_again_leaves(code: int) -> None:
    ranks = leaving(r0=[0], r1=[0], r2=[-9, code])
    ranks.joins = False
    assert ranks.run() == {}
    assert ranks.started == [0, 1, 2, 2] and members_of(ranks) == (0, 1)


def test_a_rank_that_died_of_the_fault_of_another_one_does_not_leave() -> None:
    ranks = leaving(r0=[0], r1=[0], r2=[-9, -9, 0])
    start = ranks.start

    def start_after_fault(rank: int) -> StandIn:
        started = start(rank)
        if ranks.started.count(2) == 2:
            ranks.store.end(1, Fault(0, "is behind", 1.0))
        return started

    ranks.start = start_after_fault  # type: ignore[method-assign]
    assert ranks.run() == {}
    assert members_of(ranks) == (0, 1, 2)


def test_no_rank_leaves_where_too_few_are_left() -> None:
    ranks = leaving(r0=[0], r1=[-9, -9, 0])
    assert ranks.run() == {}
    assert members_of(ranks) == (0, 1)


def test_a_rank_that_has_left_ends_as_it_likes() -> None:
    ranks = leaving(r0=[0], r1=[0], r2=[-9, -9], r3=[None])
    supervisor = Supervisor(ranks.store, 4, start=ranks.start, limits=Limits(3))
    supervisor._members = (0, 1, 2)
    supervisor.processes = {3: StandIn(2)}
    assert supervisor._poll() == {} and not supervisor.processes


@pytest.mark.parametrize("code", [1, 2])
def test_a_rank_that_ends_with_a_code_ends_the_others(code: int) -> None:
    ranks = Ranks(r0=[None], r1=[code])
    started = {}
    start = ranks.start

    def remember(rank: int) -> StandIn:
        started[rank] = start(rank)
        return started[rank]

    ranks.start = remember  # type: ignore[method-assign]
    assert ranks.run() == {1: code}
    assert started[0].signals == [signal.SIGTERM], "it may save first"
    assert ranks.started == [0, 1]
    final = ranks.store.final_error()
    assert final is not None and f"rank 1: it ended with exit code {code}" in final.text


def test_no_rank_is_started_again_after_the_last_restart_a_stop_or_the_end() -> None:
    final = FinalError("rank 1: SIGSEGV ended it", is_reported=True)
    limited = Ranks(r0=[None], r1=[-9, -9, -11])
    assert limited.run(max_restarts=2) == {1: -11}
    assert limited.store.final_error() == final
    assert limited.store.current() == 3, "the others wait for nobody in the last generation"
    stopped = Ranks(r0=[0], r1=[-11])
    stopped.stops.append(signal.SIGTERM)
    assert stopped.run() == {1: -11}
    assert (stopped.store.final_error(), stopped.store.current()) == (final, 1)
    finished = Ranks(r0=[0], r1=[-11])
    for _ in range(2):
        finished.store.finish(0)
    assert finished.run() == {1: -11}
    assert (finished.store.final_error(), finished.store.current()) == (None, 0)


def test_a_spare_process_is_prepared_once_the_ranks_have_met_and_after_every_restart() -> None:
    prepared: list[int] = []
    ranks = Ranks(r0=[0], r1=[-9, 0])
    ranks.store.decide(0, Decision())
    supervisor = Supervisor(
        ranks.store,
        2,
        start=ranks.start,
        limits=Limits(3),
        prepare=lambda: prepared.append(ranks.store.current()),
    )
    ranks.store.decide(1, Decision())
    assert supervisor.run() == {}
    assert prepared in ([0, 1], [1])


PROGRAM = """
import json, os, sys
start = json.loads(sys.stdin.readline()) if __file__.endswith("spare.py") else None
environment = os.environ | (start["environment"] if start else {})
arguments = start["arguments"] if start else sys.argv[1:]
with open(arguments[0] + environment["RANK"], "w") as file:
    file.write(f"{bool(start)} {environment['LOCAL_WORLD_SIZE']} {environment['MASTER_PORT']}")
"""


def test_a_spare_process_takes_the_place_of_a_rank(tmp_path: Path) -> None:
    package = tmp_path / "program"
    package.mkdir()
    for name in ("__init__", "__main__", "spare"):
        (package / f"{name}.py").write_text("" if name == "__init__" else PROGRAM)
    starter = RankStarter(
        ["program", f"{tmp_path}/rank-"],
        environment=os.environ | {"PYTHONPATH": str(tmp_path)},
        address=("127.0.0.1", 1234),
        num_ranks=2,
    )
    for rank, has_spare in enumerate((False, True)):
        if has_spare:
            starter.prepare()
        process = starter.start(rank)
        deadline = time.monotonic() + HANG_S
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert process.poll() == 0
        assert (tmp_path / f"rank-{rank}").read_text() == f"{has_spare} 2 1234"
    starter.close()


def test_a_spare_process_that_has_died_is_not_used(tmp_path: Path) -> None:
    starter = RankStarter(
        ["program"], environment=os.environ, address=("127.0.0.1", 1234), num_ranks=2
    )
    starter.prepare()  # there is no such module
    spare = starter._spare
    assert spare is not None
    spare.wait()
    assert starter._start_in_spare({"RANK": "1"}) is None
    assert starter._start_in_spare({"RANK": "1"}) is None, "it is tried once"


def test_a_rank_has_the_variables_of_torchrun() -> None:
    environment = rank_environment(1, 4, address=("127.0.0.1", 29))
    assert json.dumps(environment)
    assert (environment["RANK"], environment["WORLD_SIZE"]) == ("1", "4")
    assert environment["TORCHELASTIC_USE_AGENT_STORE"] == "True"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--nproc-per-node=2"], ""),
        (["--nproc-per-node=2", "--max-restarts=3"], "with --max-restarts"),
        (
            ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=a:29500"],
            "on several machines",
        ),
    ],
)
def test_what_only_the_agent_of_torchrun_can_start_has_a_reason(
    options: list[str], says: str
) -> None:
    assert reason_for_agent(read_options(options, ["program"]), options) == says


@pytest.mark.parametrize(("options", "numbers"), [([], [2]), (["--max-restarts=3"], [])])
def test_that_ranks_may_leave_is_checked_where_they_do(
    options: list[str], numbers: list[int]
) -> None:
    checked: list[int] = []
    limits = Limits(3, require_smaller_world=checked.append)
    ranks = ["--nproc-per-node=2", *options]
    check_ranks(["program"], options=ranks, check=lambda num_ranks: None, in_place=limits)
    assert checked == numbers
