"""The laws that every schedule by name keeps."""

import pytest

from nanotrain.parallel.pp.actions import ActionKind, PipelineShape
from nanotrain.parallel.pp.schedules import SCHEDULES, one_stage

# The pipelines that a schedule takes: (ranks, stages on each of them).
PIPELINES = {"one_stage": [(1, 1)], "interleaved": [(2, 2), (3, 2)]}
CASES = [
    (name, PipelineShape(*pipeline, num_microbatches))
    for name in SCHEDULES
    for pipeline in PIPELINES.get(name, [(1, 1), (2, 1), (3, 1)])
    for num_microbatches in (pipeline[0], 2 * pipeline[0], 6)
]


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_every_microbatch_passes_every_stage_once_forward_and_then_once_backward(name, shape):
    schedule = SCHEDULES[name](shape)
    assert len(schedule.actions) == shape.num_ranks
    expected = [(stage, m) for stage in range(shape.num_stages) for m in range(shape.num_microbatches)]
    kinds = list(ActionKind) if schedule.has_weight_actions else [ActionKind.forward, ActionKind.backward]
    for kind in kinds:
        assert sorted((a.stage, a.microbatch) for a in schedule if a.kind is kind) == expected
    for rank, actions in enumerate(schedule.actions):
        assert {action.stage for action in actions} == set(shape.stages_of(rank))
        for stage, microbatch in {(action.stage, action.microbatch) for action in actions}:
            order = [a.kind for a in actions if (a.stage, a.microbatch) == (stage, microbatch)]
            assert order == kinds


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_one_action_completes_the_gradients_of_every_stage(name, shape):
    schedule = SCHEDULES[name](shape)
    for rank in range(shape.num_ranks):
        last = schedule.last_backwards(rank)
        assert sorted(action.stage for action in last) == list(shape.stages_of(rank))
        for action in last:
            behind = schedule.actions[rank][schedule.actions[rank].index(action) + 1 :]
            assert not [other for other in behind if other.stage == action.stage]


def test_without_a_pipeline_one_microbatch_lives_at_a_time():
    (actions,) = one_stage(PipelineShape(1, 1, 3)).actions
    assert " ".join(map(str, actions)) == "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2"
