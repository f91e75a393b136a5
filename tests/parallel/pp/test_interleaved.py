"""The order of interleaved 1F1B, and counts of microbatches that are no multiple of the ranks."""

from dataclasses import replace
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from nanotrain.parallel.pp.actions import Action, ActionKind, PipelineShape, Schedule
from nanotrain.parallel.pp.interleaved import (
    alternate,
    backwards_of,
    forwards_of,
    interleaved,
    num_warmup,
    split_rounds,
)
from nanotrain.parallel.pp.simulate import simulate

shapes = st.builds(PipelineShape, st.integers(1, 6), st.integers(2, 4), st.integers(1, 13))


@given(shapes)
def test_after_the_warmup_forwards_and_backwards_alternate(shape: PipelineShape) -> None:
    if shape.num_microbatches % shape.num_ranks:
        return
    for rank, actions in enumerate(interleaved(shape).actions):
        warmup = min(num_warmup(shape, rank), len(actions) // 2)
        kinds = [action.kind for action in actions]
        assert kinds[:warmup] == [ActionKind.forward] * warmup
        steady = kinds[warmup : len(kinds) - warmup]
        assert steady == [ActionKind.forward, ActionKind.full_backward] * (len(steady) // 2)


def torch_schedule(shape: PipelineShape) -> Schedule | None:
    """The order of torch's ScheduleInterleaved1F1B; None where its rounds would differ in size."""
    planner: Any = ScheduleInterleaved1F1B.__new__(ScheduleInterleaved1F1B)
    planner.pp_group_size, planner.n_local_stages = shape.num_ranks, shape.num_stages_per_rank
    planner._n_microbatches = shape.num_microbatches
    num_rounds = max(1, shape.num_microbatches // shape.num_ranks)
    planner.microbatches_per_round = shape.num_microbatches // num_rounds
    if shape.num_microbatches % num_rounds:
        return None
    kinds = {"FORWARD": ActionKind.forward, "FULL_BACKWARD": ActionKind.full_backward}
    return Schedule(
        tuple(
            tuple(
                Action(kinds[op.computation_type.name], op.stage_index, op.microbatch_index)
                for op in planner._calculate_single_rank_operations(rank)
                if op is not None
            )
            for rank in range(shape.num_ranks)
        )
    )


@given(shapes.filter(lambda shape: shape.num_ranks > 1))
@example(PipelineShape(8, 4, 9))
@example(PipelineShape(4, 2, 10))
@example(PipelineShape(6, 3, 4))
def test_no_step_is_longer_than_that_of_torch_or_of_a_shorter_last_round(shape: PipelineShape) -> None:
    duration = simulate(interleaved(shape)).duration
    if (theirs := torch_schedule(shape)) is not None:
        assert duration <= simulate(theirs).duration
    multiple = -(-shape.num_microbatches // shape.num_ranks) * shape.num_ranks
    full = interleaved(replace(shape, num_microbatches=multiple))
    kept = tuple(tuple(a for a in actions if a.microbatch < shape.num_microbatches) for actions in full.actions)
    assert duration <= simulate(Schedule(kept)).duration


def test_nine_microbatches_on_eight_ranks_take_the_time_of_torch() -> None:
    assert simulate(interleaved(PipelineShape(8, 4, 9))).duration == 129


@given(shapes, st.data())
def test_a_rank_runs_rounds_of_microbatches_through_its_stages(shape: PipelineShape, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, shape.num_ranks - 1))
    forwards, backwards = forwards_of(shape, rank), backwards_of(shape, rank)
    stages = [action.stage for action in forwards[:: len(split_rounds(shape)[0])]]
    assert stages[: shape.num_stages_per_rank] == list(shape.stages_of(rank))
    assert {(a.stage, a.microbatch) for a in forwards} == {(a.stage, a.microbatch) for a in backwards}


def test_a_warmup_longer_than_the_forwards_runs_them_all_first() -> None:
    shape = PipelineShape(1, 1, 2)
    actions = alternate(forwards_of(shape, 0), backwards_of(shape, 0), warmup=5)
    assert " ".join(map(str, actions)) == "F0.0 F0.1 B0.0 B0.1"
