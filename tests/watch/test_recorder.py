"""Which ranks have not arrived at a collective, from the flight recorders of the ranks."""

from nanotrain.comm.flight_recorder import RecordedCollective
from nanotrain.topology.topology import Topology
from nanotrain.watch.recorder import unmatched_collectives
from tests.harness import parallel_config

WORLD = Topology.of(parallel_config(tp=2), 4)


def at(sequence: int, state: str, *, group: str = "world", op: str = "all_reduce") -> RecordedCollective:
    return RecordedCollective(group, (), sequence, op, ((8, 2),), ("Float",), state)


def test_ranks_that_have_not_arrived_are_named_with_operation_sizes_and_number():
    recorded = {rank: [at(5, "started")] for rank in (0, 1, 3)} | {2: [at(4, "completed")]}
    assert unmatched_collectives(recorded, WORLD) == (
        "group world (ranks 0-3): all_reduce #5 of [8, 2] Float: ranks 0-1, 3 arrived (started), rank 2 did not",
    )


def test_ranks_whose_recorder_cannot_be_read_are_not_accused():
    (line,) = unmatched_collectives({rank: [at(5, "started")] for rank in (0, 1, 3)}, WORLD)
    assert "did not" not in line and line.endswith("nothing is known of rank 2")


def test_disjoint_groups_of_one_name_are_compared_apart():
    recorded = {0: [at(9, "scheduled", group="tp")], 1: [at(8, "completed", group="tp")]}
    recorded |= {2: [at(3, "completed", group="tp")], 3: [at(3, "completed", group="tp")]}
    (line,) = unmatched_collectives(recorded, WORLD)
    assert line.startswith("group tp (ranks 0-1): all_reduce #9") and line.endswith(", rank 1 did not")


def test_a_failed_collective_of_gloo_is_complete_and_still_found():
    recorded = {rank: [at(6 if rank else 7, "completed")] for rank in range(4)}
    (line,) = unmatched_collectives(recorded, WORLD)
    assert "all_reduce #7" in line and line.endswith("ranks 1-3 did not")


def test_ranks_that_agree_give_no_line():
    assert unmatched_collectives({rank: [at(6, "completed")] for rank in range(4)}, WORLD) == ()
