"""Simulation of schedules: times, memory, and errors that would be hangs or wrong gradients."""

import pytest

from nanotrain.errors import ScheduleError
from nanotrain.parallel.pp.actions import (
    PipelineShape,
    Schedule,
    backward_input,
    backward_weight,
    forward,
    full_backward,
)
from nanotrain.parallel.pp.schedules import SCHEDULES
from nanotrain.parallel.pp.simulate import Costs, simulate


def test_an_action_starts_when_its_rank_and_what_it_needs_are_ready() -> None:
    timeline = simulate(
        SCHEDULES["1f1b"](PipelineShape(2, 1, 1)), costs=Costs(forward=2, backward=5)
    )

    times = [
        [(str(span.action), span.start, span.end) for span in spans] for spans in timeline.spans
    ]
    assert times == [[("F0.0", 0, 2), ("B0.0", 9, 14)], [("F1.0", 2, 4), ("B1.0", 4, 9)]]
    assert timeline.duration == 14 and timeline.bubble_fraction == 0.5


def test_transfers_take_time_between_ranks_only() -> None:
    slow = Costs(transfer=10)
    assert simulate(SCHEDULES["1f1b"](PipelineShape(2, 1, 1)), costs=slow).duration == 6 + 20
    assert simulate(SCHEDULES["interleaved"](PipelineShape(1, 2, 1)), costs=slow).duration == 6


def test_a_split_backward_takes_as_long_as_a_full_one() -> None:
    full = Schedule(((forward(0, 0), full_backward(0, 0)),))
    split = Schedule(((forward(0, 0), backward_input(0, 0), backward_weight(0, 0)),))
    costs = Costs(forward=1, backward=7, weight=3)
    assert simulate(full, costs=costs).duration == simulate(split, costs=costs).duration == 8


def test_a_deadlock_names_its_ranks() -> None:
    # Given a first rank that wants its gradients back before it has sent the second microbatch
    # forward,
    first = (forward(0, 0), full_backward(0, 0), forward(0, 1), full_backward(0, 1))
    second = (forward(1, 0), forward(1, 1), full_backward(1, 0), full_backward(1, 1))
    with pytest.raises(ScheduleError, match="deadlocks: rank 0 at B0.0, rank 1 at F1.1"):
        simulate(Schedule((first, second)))


@pytest.mark.parametrize(
    ("actions", "complaint"),
    [
        ([forward(0, 0), full_backward(0, 0), full_backward(0, 0)], "microbatch 0 with F B B:"),
        ([forward(0, 0), full_backward(0, 0), forward(0, 1)], "microbatch 1 with F:"),
        ([forward(0, 0), forward(0, 2)], "microbatch 1 with no action"),
        ([forward(0, 0), backward_input(0, 0)], "microbatch 0 with F I:"),
        ([forward(0, 0), full_backward(0, 0), backward_weight(0, 0)], "microbatch 0 with F B W:"),
        ([full_backward(0, 0), forward(0, 0)], "rank 0 at B0.0"),
        ([forward(0, 0), backward_weight(0, 0), backward_input(0, 0)], "rank 0 at W0.0"),
        ([forward(1, 0)], "stage 0 runs microbatch 0 with no action"),
    ],
)
def test_an_action_that_is_missing_repeated_or_too_early_is_an_error(actions, complaint) -> None:
    with pytest.raises(ScheduleError, match=complaint):
        simulate(Schedule((tuple(actions),)))


def test_a_stage_on_two_ranks_is_an_error() -> None:
    with pytest.raises(
        ScheduleError, match="F0.0 is on rank 0, other actions of its stage are on rank 1"
    ):
        simulate(Schedule(((forward(0, 0),), (full_backward(0, 0),))))


def test_peaks_count_until_the_backward_or_the_weight_gradients() -> None:
    # Given weight gradients that are deferred to the end,
    actions = (
        forward(0, 0),
        backward_input(0, 0),
        forward(0, 1),
        backward_input(0, 1),
        backward_weight(0, 0),
        backward_weight(0, 1),
    )
    timeline = simulate(Schedule((actions,)))

    assert timeline.peak_in_flight == (1,) and timeline.peak_until_wgrad == (2,)
