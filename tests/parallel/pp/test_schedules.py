"""The laws that every schedule by name keeps."""

import pytest

from nanotrain.parallel.pp.actions import ActionKind
from nanotrain.parallel.pp.schedules import SCHEDULES, one_stage


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_microbatches", [1, 2, 7])
def test_every_microbatch_runs_forward_once_and_then_backward_once(name, num_microbatches):
    for actions in SCHEDULES[name](num_microbatches).actions:
        ran = {kind: [(a.stage, a.microbatch) for a in actions if a.kind is kind] for kind in ActionKind}
        for kind in ActionKind:
            assert len(set(ran[kind])) == len(ran[kind])
            assert {microbatch for _, microbatch in ran[kind]} == set(range(num_microbatches))
        for action in actions:
            if action.kind is ActionKind.backward:
                before = actions[: actions.index(action)]
                assert any(a.kind is ActionKind.forward and a.microbatch == action.microbatch for a in before)


def test_without_a_pipeline_one_microbatch_lives_at_a_time():
    (actions,) = one_stage(3).actions
    assert " ".join(map(str, actions)) == "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2"
