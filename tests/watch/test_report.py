"""The diagnosis of hung ranks from their heartbeats: who is behind, in which collective, and where
ranks differ.
"""

import pytest

from nanotrain.comm.flight_recorder import RecordedCollective
from nanotrain.comm.heartbeat import Beat, Collective, Waiting
from nanotrain.topology.topology import Topology
from nanotrain.watch.report import RankView, diagnose, report_text, unmatched_collectives
from tests.harness import parallel_config

DATA_PARALLEL = Topology.of(parallel_config(), 4)
PIPELINE = Topology.of(parallel_config(pp=4), 4)


def view(
    rank: int, *, state: str = "S", last: Collective | None = None, group: str = "world", **fields
) -> RankView:
    values = {"beats": 9, "is_alarmed": False, "step": 7, "phase": "step"}
    collectives = {group: last} if last else {}
    return RankView(
        rank,
        "node",
        100 + rank,
        state,
        Beat(**(values | {"action": "", "collectives": collectives} | fields)),
    )


def waits(
    rank: int,
    *,
    sequence: int = 12,
    op: str = "all_reduce",
    num_bytes: int = 64,
    group: str = "world",
):
    waiting = Waiting(group, op, sequence)
    return view(rank, last=Collective(sequence, op, num_bytes), group=group, waiting=waiting)


def by_rank(*views: RankView) -> dict[int, RankView]:
    return {each.rank: each for each in views}


def test_a_rank_that_did_not_start_a_collective_is_behind():
    late_rank = view(2, last=Collective(11, "all_gather", 32), action="B0.3")
    diagnosis = diagnose(by_rank(waits(0), waits(1), late_rank, waits(3)), DATA_PARALLEL)
    assert diagnosis.ranks == (2,)
    assert diagnosis.headline == (
        "rank 2 (dp2, host node, pid 102) is behind: ranks 0-1, 3 wait for all_reduce #12 of group world; "
        "it was in step 7, phase step, action B0.3"
    )
    assert diagnosis.details == (
        "group world (ranks 0-3): last started by ranks 0-1, 3: #12 all_reduce of 64 bytes; "
        "rank 2: #11 all_gather of 32 bytes",
    )


@pytest.mark.parametrize(
    ("state", "cause"),
    [("T", "is stopped"), ("", "ended without an error message"), ("?", "did not reply")],
)
def test_a_frozen_lost_or_silent_rank_is_named_first(state, cause):
    frozen = (
        view(1, state=state, last=Collective(11, "all_reduce", 64))
        if state != "?"
        else RankView(1, "b", 5, "?")
    )
    diagnosis = diagnose(by_rank(waits(0), frozen, view(2), waits(3)), DATA_PARALLEL)
    assert diagnosis.ranks == (1,) and cause in diagnosis.headline


def test_a_rank_that_finished_is_not_lost():
    diagnosis = diagnose(
        by_rank(view(0, state="", phase="finished"), view(1), view(2), view(3)), DATA_PARALLEL
    )
    assert diagnosis.ranks == () and "no rank waits for another one" in diagnosis.headline


def test_the_end_of_a_chain_of_pipeline_stages_is_behind_not_those_that_wait_for_it():
    def stage(rank: int, source: int) -> RankView:
        return view(rank, waiting=Waiting("pp", "p2p", 3, peer=source), action=f"F{rank}.0")

    diagnosis = diagnose(
        by_rank(view(0, action="F0.0"), stage(1, 0), stage(2, 1), stage(3, 2)), PIPELINE
    )
    assert (
        diagnosis.ranks == (0,) and "rank 1 waits for a message of group pp" in diagnosis.headline
    )


def test_ranks_in_different_collectives_wait_for_each_other():
    topology = Topology.of(parallel_config(tp=2), 2)
    first = view(
        0,
        waiting=Waiting("tp", "all_reduce", 2),
        collectives={"tp": Collective(2, "all_reduce", 8)},
    )
    second = view(
        1,
        waiting=Waiting("world", "all_reduce", 1),
        collectives={"world": Collective(1, "all_reduce", 8)},
    )
    diagnosis = diagnose(by_rank(first, second), topology)
    assert (
        diagnosis.ranks == (0, 1)
        and "wait for each other: they started their collectives in different" in diagnosis.headline
    )


def test_where_no_rank_waits_those_that_started_fewer_collectives_are_named():
    def at(rank: int, sequence: int, **fields) -> RankView:
        return view(rank, last=Collective(sequence, "all_reduce", 64), **fields)

    diagnosis = diagnose(
        by_rank(at(0, 12), at(1, 13), at(2, 11, phase="hooks"), at(3, 13)), DATA_PARALLEL
    )
    assert diagnosis.ranks == (2,)
    assert diagnosis.headline == (
        "rank 2 (dp2, host node, pid 102) started fewer collectives than ranks 0-1, 3; it was in step 7, phase hooks"
    )


def test_different_sizes_of_the_same_collective_are_where_ranks_differ():
    views = by_rank(waits(0), waits(1), waits(2), waits(3, num_bytes=80))
    diagnosis = diagnose(views, DATA_PARALLEL)
    assert diagnosis.headline == "the ranks of a group started different collectives"
    assert "rank 3: #12 all_reduce of 80 bytes" in diagnosis.details[0]
    views = by_rank(*(waits(rank, op="all_to_all", num_bytes=rank) for rank in range(4)))
    assert diagnose(views, DATA_PARALLEL).details == (), "uneven sizes are usual there"


def test_the_report_lists_the_ranks_behind_first():
    views = by_rank(waits(0), waits(1), waits(2), view(3, state="T"))
    text = report_text(
        diagnose(views, DATA_PARALLEL), views, topology=DATA_PARALLEL, title=["reason: x"]
    )
    lines = text.splitlines()
    header = next(
        number for number, line in enumerate(lines) if line.startswith("rank  coordinates")
    )
    assert lines[header + 1].split()[:5] == ["3", "dp3", "node", "103", "stopped"]
    assert "world all_reduce #12" in lines[header + 2]


WORLD = Topology.of(parallel_config(tp=2), 4)


def at(
    sequence: int, state: str, *, group: str = "world", op: str = "all_reduce"
) -> RecordedCollective:
    return RecordedCollective(group, (), sequence, op, ((8, 2),), ("Float",), state)


def test_ranks_that_have_not_arrived_are_named_with_operation_sizes_and_number():
    recorded = {rank: [at(5, "started")] for rank in (0, 1, 3)} | {2: [at(4, "completed")]}
    assert unmatched_collectives(recorded, WORLD) == (
        "group world (ranks 0-3): all_reduce #5 of [8, 2] Float: ranks 0-1, 3 arrived (started), rank 2 did not",
    )


def test_ranks_whose_recorder_cannot_be_read_are_not_named_as_absent():
    (line,) = unmatched_collectives({rank: [at(5, "started")] for rank in (0, 1, 3)}, WORLD)
    assert "did not" not in line and line.endswith("nothing is known of rank 2")


def test_disjoint_groups_of_one_name_are_compared_apart():
    recorded = {0: [at(9, "scheduled", group="tp")], 1: [at(8, "completed", group="tp")]}
    recorded |= {2: [at(3, "completed", group="tp")], 3: [at(3, "completed", group="tp")]}
    (line,) = unmatched_collectives(recorded, WORLD)
    assert line.startswith("group tp (ranks 0-1): all_reduce #9") and line.endswith(
        ", rank 1 did not"
    )


def test_a_failed_collective_of_gloo_is_complete_and_still_found():
    recorded = {rank: [at(6 if rank else 7, "completed")] for rank in range(4)}
    (line,) = unmatched_collectives(recorded, WORLD)
    assert "all_reduce #7" in line and line.endswith("ranks 1-3 did not")


def test_ranks_that_agree_give_no_line():
    assert unmatched_collectives({rank: [at(6, "completed")] for rank in range(4)}, WORLD) == ()


def test_a_rank_whose_connections_were_closed_while_it_runs_is_named_with_them():
    diagnosis = diagnose(by_rank(*map(waits, range(4))), DATA_PARALLEL, cut={0: 1, 1: 2, 3: 1})
    assert diagnosis.ranks == (1,)
    assert diagnosis.headline.startswith(
        "rank 1 (dp1, host node, pid 101) runs, but connections of it were closed (from rank 0 to 1, 1 to 2, 3 to 1); "
    )
    both = diagnose(by_rank(*map(waits, range(4))), DATA_PARALLEL, cut={0: 1, 1: 0})
    assert both.ranks == (0, 1)
