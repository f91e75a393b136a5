"""Schedules in any order that respects what each action needs."""

import random

from nanotrain.parallel.pp.actions import Action, PipelineShape, Schedule, backward, forward, weight
from nanotrain.parallel.pp.simulate import needed_by


def schedule_of_chance(shape: PipelineShape, chance: random.Random, *, is_split: bool) -> Schedule:
    """Draw the next action among all that could run, until none is left."""
    kinds = (forward, backward, weight) if is_split else (forward, backward)
    numbers = range(shape.num_microbatches)
    left = [kind(stage, m) for kind in kinds for stage in range(shape.num_stages) for m in numbers]
    done: list[Action] = []
    while left:
        ready = [action for action in left if set(needed_by(action, num_stages=shape.num_stages)) <= set(done)]
        action = chance.choice(ready)
        left.remove(action)
        done.append(action)
    ranks = range(shape.num_ranks)
    return Schedule(tuple(tuple(a for a in done if a.stage % shape.num_ranks == rank) for rank in ranks))
