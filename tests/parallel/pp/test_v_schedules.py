"""Schedules in a V: their bubble, and the orders of torch's classes."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleZBVZeroBubble

from nanotrain.errors import ScheduleError
from nanotrain.parallel.pp.actions import (
    Action,
    ActionKind,
    Pair,
    PipelineShape,
    Schedule,
    forward,
    full_backward,
)
from nanotrain.parallel.pp.schedules import SCHEDULES
from nanotrain.parallel.pp.simulate import simulate
from tests.parallel.pp.test_schedules import PER_RANK, bubble


@pytest.mark.parametrize("name", ["zb-v", "dualpipev"])
@given(p=st.integers(1, 8), more=st.integers(0, 12), unit=st.integers(1, 5))
def test_in_a_v_ranks_wait_only_while_the_pipeline_fills(
    name: str, p: int, more: int, unit: int
) -> None:
    m, costs = 2 * p + more, {"forward": unit, "backward": 2 * unit, "weight": unit}

    assert bubble(name, p, 2, m, **costs) == Fraction(p - 1, 6 * m + p - 1)


def of_torch(planner: Any, shape: PipelineShape) -> Schedule:
    """The order of a class of torch, whose pairs are a forward and a backward after each other."""
    planner = planner.__new__(planner)
    planner.pp_group_size, planner.num_stages = shape.num_ranks, shape.num_stages
    planner._n_microbatches = shape.num_microbatches
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    steps = [
        filter(None, planner._calculate_single_rank_operations(rank))
        for rank in range(shape.num_ranks)
    ]
    return Schedule(
        tuple(
            tuple(
                Action(
                    ActionKind(kinds[op.computation_type.name]), op.stage_index, op.microbatch_index
                )
                for step in of_rank
                for op in (step.sub_actions or (step,))
            )
            for of_rank in steps
        )
    )


def pairs_of_torch(shape: PipelineShape) -> set[Pair]:
    """The pairs of torch's DualPipeV."""
    planner: Any = ScheduleDualPipeV.__new__(ScheduleDualPipeV)
    planner.pp_group_size, planner._n_microbatches = shape.num_ranks, shape.num_microbatches
    steps = (
        step
        for rank in range(shape.num_ranks)
        for step in planner._calculate_single_rank_operations(rank)
    )
    subs = (step.sub_actions for step in steps if step is not None and step.sub_actions)
    return {
        Pair(
            forward(f.stage_index, f.microbatch_index),
            full_backward(b.stage_index, b.microbatch_index),
        )
        for f, b in subs
    }


@given(p=st.integers(1, 6), m=st.integers(1, 16))
def test_v_schedules_are_those_of_torch(p: int, m: int) -> None:
    shape = PipelineShape(p, 2, m)
    ours, theirs = SCHEDULES["zb-v"](shape), of_torch(ScheduleZBVZeroBubble, shape)

    assert (
        simulate(ours) == simulate(theirs) or simulate(ours).duration == simulate(theirs).duration
    )
    # weight gradients at the end are in any order
    for mine, other in zip(ours.actions, theirs.actions, strict=True):
        assert [a for a in mine if not a.kind.has_wgrad] == [
            a for a in other if not a.kind.has_wgrad
        ]
    if m >= 2 * p:  # with fewer theirs raises
        assert SCHEDULES["dualpipev"](shape) == of_torch(ScheduleDualPipeV, shape)
        pairs = SCHEDULES["dualpipev"](replace(shape, has_pairs=True)).pairs
        theirs = pairs_of_torch(shape)
        assert pairs >= theirs and len(pairs - theirs) <= 1  # one on the last rank


@pytest.mark.parametrize("name", PER_RANK)
@pytest.mark.parametrize("per_rank", [1, 3])
def test_a_v_has_two_stages_per_rank(name: str, per_rank: int) -> None:
    flag = "--num-virtual-stages-per-pipeline-rank"
    with pytest.raises(
        ScheduleError, match=f"{name} with {flag} {per_rank}: every rank holds two.*set {flag} 2"
    ):
        SCHEDULES[name](PipelineShape(4, per_rank, 8))
