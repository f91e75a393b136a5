"""The order of transfers is the same on every rank, so there is no deadlock even if every transfer
blocks its rank.
"""

import random

from hypothesis import given
from hypothesis import strategies as st

from nanotrain.parallel.pp.actions import Action, PipelineShape, Schedule, forward, full_backward
from nanotrain.parallel.pp.schedules import SCHEDULES
from nanotrain.parallel.pp.transfers import RankPlan, TransferBatch, plan_rank
from tests.parallel.pp.random_schedules import random_schedule
from tests.parallel.pp.test_schedules import named_shapes


def plans_of(schedule: Schedule) -> list[RankPlan]:
    return [plan_rank(schedule, rank) for rank in range(len(schedule.actions))]


def check_no_deadlock(schedule: Schedule) -> None:
    """Simulate all ranks with transfers that block their rank until both sides have started them.

    No backend is stricter: NCCL lets at most the batches of one group wait for each other in their
    order.
    """
    plans = plans_of(schedule)
    at, started, done = [0] * len(plans), set(), set()
    moved = True
    while moved:
        moved = False
        for rank, plan in enumerate(plans):
            while at[rank] < len(plan.steps):
                step = plan.steps[at[rank]]
                if isinstance(step, TransferBatch):
                    mine = {(str(send.to), rank, send.peer) for send in step.sends}
                    mine |= {(str(receive.to), receive.peer, rank) for receive in step.receives}
                    moved |= any((rank, message) not in started for message in mine)
                    started |= {(rank, message) for message in mine}
                    if any(
                        (side, message) not in started for message in mine for side in message[1:]
                    ):
                        break
                else:
                    done.add(step)
                at[rank] += 1
                moved = True
    assert at == [len(plan.steps) for plan in plans], "ranks deadlock"
    assert done == set(schedule)


def check_deliveries(schedule: Schedule) -> None:
    """Every message is sent once, after it is computed, and received once, before it is used, in
    order.
    """
    homes = {
        action.stage: rank for rank, actions in enumerate(schedule.actions) for action in actions
    }
    sent: dict[tuple[int, int], list[Action]] = {}
    received: dict[tuple[int, int], list[Action]] = {}
    for rank, plan in enumerate(plans_of(schedule)):
        ran: set[Action] = set()
        here: set[Action] = set()
        for step in plan.steps:
            if isinstance(step, Action):
                others = [o for o in schedule.dependencies_of(step) if homes[o.stage] != rank]
                assert step in here or not others, f"{step} runs before what it needs is received"
                ran.add(step)
                continue
            for send in step.sends:
                (made,) = [o for o in schedule.dependencies_of(send.to) if o.stage != send.to.stage]
                assert made in ran, f"{made} is sent before it is made"
                sent.setdefault((rank, send.peer), []).append(send.to)
            for receive in step.receives:
                here.add(receive.to)
                received.setdefault((receive.peer, rank), []).append(receive.to)
    assert sent == received, "gloo and NCCL deliver in order, without looking at what it is"
    assert all(len(set(messages)) == len(messages) for messages in sent.values())


@given(named_shapes())
def test_no_named_schedule_deadlocks_or_mixes_up_messages(named) -> None:
    name, shape = named
    schedule = SCHEDULES[name](shape)
    check_no_deadlock(schedule)
    check_deliveries(schedule)


@given(
    p=st.integers(1, 4),
    v=st.integers(1, 3),
    m=st.integers(1, 4),
    split=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_no_schedule_at_all_deadlocks_or_mixes_up_messages(
    p: int, v: int, m: int, split: bool, seed: int
) -> None:
    schedule = random_schedule(PipelineShape(p, v, m), random.Random(seed), is_split=split)
    check_no_deadlock(schedule)
    check_deliveries(schedule)


def test_two_ranks_send_to_each_other_in_one_batch() -> None:
    # Given 1f1b, where rank 0 ends a forward pass at the moment rank 1 ends a backward pass,
    plan = plan_rank(SCHEDULES["1f1b"](PipelineShape(2, 1, 4)), 0)

    # then the send and the receive are in one batch.
    both = [
        step
        for step in plan.steps
        if isinstance(step, TransferBatch) and step.sends and step.receives
    ]
    assert [(str(step.sends[0].to), str(step.receives[0].to)) for step in both] == [
        ("F1.2", "B0.1"),
        ("F1.3", "B0.2"),
    ]


def test_a_message_due_during_an_action_is_received_before_it() -> None:
    # Given a first rank that ends its third forward pass in the middle of the second rank's first
    # backward pass,
    first = [forward(0, m) for m in range(3)] + [full_backward(0, m) for m in range(3)]
    second = [make(1, m) for m in range(3) for make in (forward, full_backward)]
    steps = plan_rank(Schedule((tuple(first), tuple(second))), 1).steps

    # then that message is under way before that backward pass begins.
    texts = [
        str(step) if isinstance(step, Action) else [str(r.to) for r in step.receives]
        for step in steps
    ]
    assert texts[:5] == [["F1.0"], "F1.0", ["F1.1"], ["F1.2"], "B1.0"]


def test_one_rank_sends_nothing() -> None:
    plan = plan_rank(SCHEDULES["interleaved"](PipelineShape(1, 3, 4)), 0)
    assert all(isinstance(step, Action) for step in plan.steps)
