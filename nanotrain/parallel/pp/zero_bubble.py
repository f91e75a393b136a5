"""ZB-H1: split backward passes and fill the bubble with weight gradients (Qi et al. 2023, section 2.2 and appendix).

    rank 0  F0.F1.   B0=W0-F2.B1=W1-F3.B2=W2-B3=W3-
    rank 1     F0.B0=F1.B1=W0-F2.B2=W1-F3.B3=W2-W3-

B computes the gradients of the stage's input, which the rank before waits for; W those of the weights, for which nobody
waits. Rank r puts W off by r microbatches: enough to fill its bubble, and what is kept for it, together with the
`num_ranks - r` microbatches alive as in 1F1B, is never more than the first rank holds anyway.
"""

from nanotrain.parallel.pp.actions import Action, ActionKind, PipelineShape, Schedule, weight
from nanotrain.parallel.pp.one_f_one_b import one_f_one_b, require_one_stage_per_rank


def zero_bubble_h1(shape: PipelineShape) -> Schedule:
    """1F1B with split backward passes; one stage per rank. A single rank has no bubble, and nothing is split.

    Raises:
        ScheduleError: several stages per rank.

    >>> shape = PipelineShape(num_ranks=2, num_stages_per_rank=1, num_microbatches=2)
    >>> [str(action) for action in zero_bubble_h1(shape).actions[1]]
    ['F1.0', 'B1.0', 'F1.1', 'B1.1', 'W1.0', 'W1.1']
    """
    require_one_stage_per_rank("zb-h1", shape)
    whole = one_f_one_b(shape)
    if shape.num_ranks == 1:
        return whole
    return Schedule(tuple(_with_weights(actions, delay=rank) for rank, actions in enumerate(whole.actions)))


def _with_weights(actions: tuple[Action, ...], *, delay: int) -> tuple[Action, ...]:
    """Insert after each backward pass the weight action of the one `delay` before; those left over at the end."""
    out: list[Action] = []
    waiting: list[Action] = []
    for action in actions:
        out.append(action)
        if action.kind is ActionKind.backward:
            waiting.append(weight(action.stage, action.microbatch))
            if len(waiting) > delay:
                out.append(waiting.pop(0))
    return (*out, *waiting)
