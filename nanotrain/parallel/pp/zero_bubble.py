"""ZB-H1: split backwards, with weight gradients in the bubble (Qi et al. 2023, section 2.2 and appendix).

    rank 0  F0.F1.   I0=W0-F2.I1=W1-F3.I2=W2-I3=W3-
    rank 1     F0.I0=F1.I1=W0-F2.I2=W1-F3.I3=W2-W3-

I computes the gradient of the stage's input, for which the previous rank waits; W computes the weight gradients. Rank r
delays W by r microbatches, which fills its bubble. Together with the `num_ranks - r` microbatches in flight, as in
1F1B, it keeps no more microbatches than the first rank.
"""

from nanotrain.parallel.pp.actions import Action, ActionKind, PipelineShape, Schedule, backward_input, backward_weight
from nanotrain.parallel.pp.one_f_one_b import one_f_one_b, require_one_stage_per_rank


def zero_bubble_h1(shape: PipelineShape) -> Schedule:
    """1F1B with split backwards; one stage per rank. On a single rank, which has no bubble, it is 1F1B.

    Raises:
        ScheduleError: several stages per rank.

    >>> shape = PipelineShape(num_ranks=2, num_stages_per_rank=1, num_microbatches=2)
    >>> [str(action) for action in zero_bubble_h1(shape).actions[1]]
    ['F1.0', 'I1.0', 'F1.1', 'I1.1', 'W1.0', 'W1.1']
    """
    require_one_stage_per_rank("zb-h1", shape)
    schedule = one_f_one_b(shape)
    if shape.num_ranks == 1:
        return schedule
    return Schedule(tuple(_split(actions, delay=rank) for rank, actions in enumerate(schedule.actions)))


def _split(actions: tuple[Action, ...], *, delay: int) -> tuple[Action, ...]:
    """Replace each B by I followed by the W of `delay` microbatches before; the remaining W come last."""
    out: list[Action] = []
    delayed: list[Action] = []
    for action in actions:
        if action.kind is ActionKind.forward:
            out.append(action)
            continue
        out.append(backward_input(action.stage, action.microbatch))
        delayed.append(backward_weight(action.stage, action.microbatch))
        if len(delayed) > delay:
            out.append(delayed.pop(0))
    return (*out, *delayed)
