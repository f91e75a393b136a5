"""The schedules by name, each a pure function from numbers to a `Schedule`."""

from collections.abc import Callable

from nanotrain.parallel.pp.actions import Action, ActionKind, Schedule


def one_stage(num_microbatches: int) -> Schedule:
    """The schedule without a pipeline: each microbatch forward, then backward, so one lives at a time.

    >>> [str(action) for action in one_stage(2).actions[0]]
    ['F0.0', 'B0.0', 'F0.1', 'B0.1']
    """
    kinds = (ActionKind.forward, ActionKind.backward)
    return Schedule((tuple(Action(kind, 0, m) for m in range(num_microbatches) for kind in kinds),))


SCHEDULES: dict[str, Callable[[int], Schedule]] = {"one_stage": one_stage}
