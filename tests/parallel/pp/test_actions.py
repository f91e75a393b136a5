"""Schedules as data."""

from nanotrain.parallel.pp.actions import Action, ActionKind, Schedule

F, B = ActionKind.forward, ActionKind.full_backward
I, W = ActionKind.backward_input, ActionKind.backward_weight  # noqa: E741


def test_an_action_prints_as_its_kind_stage_and_microbatch():
    assert [str(Action(F, 2, 0)), str(Action(B, 0, 13))] == ["F2.0", "B0.13"]


def test_the_last_backward_of_every_stage_of_a_rank_is_found():
    # Given a rank with stages 0 and 2, whose backwards interleave, and another rank,
    mine = (
        Action(F, 0, 0),
        Action(F, 2, 0),
        Action(B, 2, 0),
        Action(B, 0, 0),
        Action(B, 2, 1),
        Action(B, 0, 1),
    )
    schedule = Schedule((mine, (Action(B, 1, 7),)))
    # then each stage has one, the rank's own only.
    assert schedule.last_backwards(0) == {Action(B, 2, 1), Action(B, 0, 1)}
    assert schedule.last_backwards(1) == {Action(B, 1, 7)}
    assert Schedule(((Action(F, 0, 0),),)).last_backwards(0) == frozenset()


def test_the_last_weight_gradients_of_split_backwards_are_those_of_w():
    actions = (
        Action(F, 0, 0),
        Action(I, 0, 0),
        Action(F, 0, 1),
        Action(I, 0, 1),
        Action(W, 0, 0),
        Action(W, 0, 1),
    )
    assert Schedule((actions,)).last_backwards(0) == {Action(W, 0, 1)}


def test_full_and_split_backwards_can_be_mixed():
    # Given a first stage that does not split its backward and a second one that does,
    first, second = (
        (Action(F, 0, 0), Action(B, 0, 0)),
        (Action(F, 1, 0), Action(I, 1, 0), Action(W, 1, 0)),
    )
    schedule = Schedule((first, second))
    # then the gradient goes from I to B, and W depends on its own I only.
    assert schedule.consumer_of(Action(I, 1, 0)) == Action(B, 0, 0)
    assert schedule.dependencies_of(Action(B, 0, 0)) == (Action(F, 0, 0), Action(I, 1, 0))
    assert schedule.dependencies_of(Action(W, 1, 0)) == (Action(I, 1, 0),)
    assert schedule.consumer_of(Action(W, 1, 0)) is schedule.consumer_of(Action(F, 1, 0)) is None
