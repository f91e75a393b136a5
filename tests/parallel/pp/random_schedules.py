"""Random schedules in which every action comes after its dependencies."""

import random

from nanotrain.parallel.pp.actions import (
    Action,
    PipelineShape,
    Schedule,
    backward_input,
    backward_weight,
    forward,
    full_backward,
)


def random_schedule(shape: PipelineShape, chance: random.Random, *, is_split: bool) -> Schedule:
    """Draw the next action among those that can run, until none is left."""
    left: list[Action] = []
    for stage in range(shape.num_stages):
        for m in range(shape.num_microbatches):
            # Mixed: some stages and microbatches have I and W, others B.
            is_pair = is_split and chance.random() < 0.7
            kinds = (
                (forward, backward_input, backward_weight) if is_pair else (forward, full_backward)
            )
            left += [kind(stage, m) for kind in kinds]
    every = Schedule((tuple(left),))
    done: list[Action] = []
    while left:
        ready = [action for action in left if set(every.dependencies_of(action)) <= set(done)]
        action = chance.choice(ready)
        left.remove(action)
        done.append(action)
    ranks = range(shape.num_ranks)
    return Schedule(
        tuple(tuple(a for a in done if a.stage % shape.num_ranks == rank) for rank in ranks)
    )
