"""What ranks and launcher agree on after a fault: when the run goes on, and when it ends."""

import json
from collections.abc import Sequence
from dataclasses import asdict

import pytest
import torch.distributed as dist

from nanotrain.comm import generation_store
from nanotrain.comm.generation_store import (
    Decision,
    Fault,
    FinalError,
    GenerationStore,
    Members,
    decide,
)
from nanotrain.runs import verdict

KILLED = Fault(1, "SIGKILL ended it", 5.0, is_death=True)
HUNG = Fault(1, "is behind", 5.0, step=6)  # as another rank noticed: rank 1 has no exception


def history(*faults: tuple[Fault, int]) -> Decision:
    """The decision of two ranks after faults, each with the last step that was completed."""
    store = GenerationStore(dist.HashStore())
    for number, (fault, step) in enumerate(faults):
        store.join(number, 1)
        store.end(number, fault)
        store.leave(number, 0)
        if step > store.highest_step(number):
            store.note_new_step(number, step)
    return decide(store, len(faults), world_size=2, max_restarts=4)


def raised(step: int, what: str = "ValueError: bad") -> Fault:
    return Fault(1, what, 5.0, step=step, is_raised=True)


def test_a_run_without_a_new_step_ends_as_soon_in_place_as_by_whole_starts() -> None:
    assert generation_store.MAX_IDLE_RESTARTS == verdict.MAX_IDLE_RESTARTS


def test_the_first_generation_has_nothing_to_decide() -> None:
    assert history() == Decision()


@pytest.mark.parametrize(
    "faults",
    [
        [(KILLED, 6)],
        [(KILLED, 6), (KILLED, 6)],
        [(KILLED, 6), (KILLED, 6), (KILLED, 7)],
        [(KILLED, 6), (KILLED, 0), (KILLED, 7), (KILLED, 3)],  # two of them while it restores
        [(raised(6), 6), (raised(7), 7), (raised(8), 8)],
        [(raised(6), 6), (raised(6, "OSError: other"), 6)],
    ],
)
def test_a_run_goes_on_after(faults: Sequence[tuple[Fault, int]]) -> None:
    decision = history(*faults)
    assert not decision.error
    assert decision.restart is not None and decision.restart.fault == faults[-1][0]


@pytest.mark.parametrize(
    ("faults", "error", "rank"),
    [
        ([(KILLED, 6)] * 3, "3 faults without a new step: rank 1: SIGKILL ended it", None),
        ([(KILLED, 9), (KILLED, 0), (KILLED, 9)], "3 faults without a new step", None),
        ([(raised(6), 6)] * 2, "the same error twice: rank 1 in step 6: ValueError: bad", 1),
        ([(KILLED, step) for step in range(5)], "restart in place 5 of at most 4", None),
        ([(HUNG, 6)] * 2, "the same error twice: rank 1 in step 6: is behind", None),
    ],
)
def test_a_run_ends_after(faults: Sequence[tuple[Fault, int]], error: str, rank: int) -> None:
    decision = history(*faults)
    assert error in decision.error and decision.rank == rank


def test_the_first_fault_of_a_generation_counts() -> None:
    store = GenerationStore(dist.HashStore())
    store.end_generation_of(KILLED)
    assert store.current() == 0, "the rank had not joined"
    store.join(0, 1)
    store.end_generation_of(KILLED)
    store.end(0, raised(3))
    assert (store.current(), store.fault(0)) == (1, KILLED)
    store.end_generation_of(KILLED)
    assert store.current() == 1, "it died before it joined the next one"


def test_ranks_that_stay_join_from_the_next_generation_on() -> None:
    store = GenerationStore(dist.HashStore())
    assert store.members(0, 3) == Members((0, 1, 2))
    store.end(0, KILLED)
    store.let_leave([0, 2], KILLED)
    assert store.current() == 2
    assert [store.members(number, 3).ranks for number in range(3)] == [
        (0, 1, 2),
        (0, 1, 2),
        (0, 2),
    ]
    store.let_leave([2], KILLED)
    assert store.members(3, 3) == Members((2,), since=3) and store.members(2, 3).since == 2
    store.finish(3)
    assert store.is_finished(3)


def test_a_fault_that_comes_meanwhile_does_not_hide_who_stays() -> None:
    store = GenerationStore(dist.HashStore())
    store._store.set("fault-0", json.dumps(asdict(HUNG)))  # another one ends generation 0 just now
    store.let_leave([0], KILLED)
    assert store.current() == 2 and store.fault(1) == KILLED
    assert store.members(2, 2).ranks == (0,)


def test_generations_without_a_new_step_are_counted_anew_where_a_rank_has_left() -> None:
    store = GenerationStore(dist.HashStore())
    store.end(0, KILLED)
    store.let_leave([0, 2], KILLED)
    errors = []
    for number in range(2, 6):
        errors.append(decide(store, number, world_size=3, max_restarts=9).error)
        store.end(number, KILLED)
    assert errors[:3] == ["", "", ""]
    assert "3 faults without a new step" in errors[3]


def test_the_highest_step_is_known_where_no_rank_has_left_a_departure() -> None:
    store = GenerationStore(dist.HashStore())
    assert store.highest_step(0) == 0
    for step in (8, 9):
        store.note_new_step(1, step)
    assert [store.highest_step(number) for number in range(4)] == [0, 0, 9, 9]
    assert store.has_new_step([0, 1]) and not store.has_new_step([0, 2])


def test_what_is_published_is_read_back() -> None:
    store = GenerationStore(dist.HashStore())
    assert store.decision(1) is None
    decision = history((KILLED, 3))
    store.decide(1, decision)
    assert store.decision(1) == decision
    assert store.final_error() is None
    final = FinalError("ConfigError: wrong")
    store.publish_final_error(final)
    assert store.final_error() == final
    for _ in range(2):
        assert not store.is_finished(2)
        store.finish(0)
    assert store.is_finished(2)
