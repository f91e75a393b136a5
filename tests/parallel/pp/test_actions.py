"""Schedules as data."""

from nanotrain.parallel.pp.actions import Action, ActionKind, Schedule

F, B = ActionKind.forward, ActionKind.backward


def test_an_action_prints_as_its_kind_stage_and_microbatch():
    assert [str(Action(F, 2, 0)), str(Action(B, 0, 13))] == ["F2.0", "B0.13"]


def test_the_last_backward_of_every_stage_of_a_rank_is_found():
    # Given a rank with stages 0 and 2, whose backwards interleave, and another rank,
    mine = (Action(F, 0, 0), Action(F, 2, 0), Action(B, 2, 0), Action(B, 0, 0), Action(B, 2, 1), Action(B, 0, 1))
    schedule = Schedule((mine, (Action(B, 1, 7),)))
    # then each stage has one, the rank's own only.
    assert schedule.last_backwards(0) == {Action(B, 2, 1), Action(B, 0, 1)}
    assert schedule.last_backwards(1) == {Action(B, 1, 7)}
    assert Schedule(((Action(F, 0, 0),),)).last_backwards(0) == frozenset()
