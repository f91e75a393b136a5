"""GPipe: the forwards of all microbatches, then all backwards (Huang et al. 2019, section 2.3).

    rank 0  F0.F1.F2.         B0====B1====B2====
    rank 1     F0.F1.F2.B0====B1====B2====

A rank keeps the activations of all microbatches. Backwards run in the order of the forwards, not reversed as in the
paper, for the same bubble: all schedules accumulate microbatches in the same order, so gradients are bit-equal.
"""

from nanotrain.parallel.pp.actions import PipelineShape, Schedule
from nanotrain.parallel.pp.interleaved import backwards_of, forwards_of


def gpipe(shape: PipelineShape) -> Schedule:
    """All forwards, then all backwards; any number of stages per rank.

    >>> [str(action) for action in gpipe(PipelineShape(2, 1, 2)).actions[1]]
    ['F1.0', 'F1.1', 'B1.0', 'B1.1']
    """
    ranks = range(shape.num_ranks)
    return Schedule(tuple((*forwards_of(shape, rank), *backwards_of(shape, rank)) for rank in ranks))


def forward_only(shape: PipelineShape) -> Schedule:
    """All forwards and no backward, for validation.

    >>> [str(action) for action in forward_only(PipelineShape(2, 2, 1)).actions[1]]
    ['F1.0', 'F3.0']
    """
    return Schedule(tuple(forwards_of(shape, rank) for rank in range(shape.num_ranks)))
