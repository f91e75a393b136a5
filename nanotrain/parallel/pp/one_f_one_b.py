"""1F1B: after a warmup, one forward and one backward in turn (Narayanan et al. 2019, section 3.2).

    rank 0  F0.F1.      B0====F2.B1====F3.B2====   B3====
    rank 1     F0.B0====F1.B1====F2.B2====F3.B3====

The bubble of GPipe, but rank r keeps the activations of at most `num_ranks - r` microbatches.
"""

from nanotrain.errors import ScheduleError
from nanotrain.parallel.pp.actions import PipelineShape, Schedule
from nanotrain.parallel.pp.interleaved import alternate, backwards_of, forwards_of


def one_f_one_b(shape: PipelineShape) -> Schedule:
    """One forward, one backward; one stage per rank.

    Raises:
        ScheduleError: several stages per rank.

    >>> shape = PipelineShape(num_ranks=2, num_stages_per_rank=1, num_microbatches=3)
    >>> [str(action) for action in one_f_one_b(shape).actions[0]]
    ['F0.0', 'F0.1', 'B0.0', 'F0.2', 'B0.1', 'B0.2']
    """
    require_one_stage_per_rank("1f1b", shape)
    last = shape.num_ranks - 1
    return Schedule(
        tuple(
            alternate(forwards_of(shape, rank), backwards_of(shape, rank), warmup=last - rank)
            for rank in range(shape.num_ranks)
        )
    )


def require_one_stage_per_rank(name: str, shape: PipelineShape) -> None:
    """Refuse several stages per rank.

    Raises:
        ScheduleError: several stages per rank.
    """
    if shape.num_stages_per_rank > 1:
        raise ScheduleError(
            f"the schedule {name} has {shape.num_stages_per_rank} stages per rank",
            why="it supports one; interleaved is 1f1b with several",
            fix="set --pipeline-schedule interleaved or --num-virtual-stages-per-pipeline-rank 1",
        )
