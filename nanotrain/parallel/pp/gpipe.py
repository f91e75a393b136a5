"""GPipe: every microbatch forward, then every one backward (Huang et al. 2019, section 2.3).

    rank 0  F0.F1.F2.         B0====B1====B2====
    rank 1     F0.F1.F2.B0====B1====B2====

The simplest schedule and the hungriest: a rank holds the activations of all microbatches at once. Backward passes run
in the order of the forward passes, not reversed as in the paper: every schedule here sums the gradients of microbatches
in the same order, so that their results are bit-equal; the bubble is the same.
"""

from nanotrain.parallel.pp.actions import PipelineShape, Schedule
from nanotrain.parallel.pp.interleaved import backwards_of, forwards_of


def gpipe(shape: PipelineShape) -> Schedule:
    """All forward passes, then all backward passes; any number of stages per rank.

    >>> [str(action) for action in gpipe(PipelineShape(2, 1, 2)).actions[1]]
    ['F1.0', 'F1.1', 'B1.0', 'B1.1']
    """
    ranks = range(shape.num_ranks)
    return Schedule(tuple((*forwards_of(shape, rank), *backwards_of(shape, rank)) for rank in ranks))


def forward_only(shape: PipelineShape) -> Schedule:
    """The forward passes alone, for validation.

    >>> [str(action) for action in forward_only(PipelineShape(2, 2, 1)).actions[1]]
    ['F1.0', 'F3.0']
    """
    return Schedule(tuple(forwards_of(shape, rank) for rank in range(shape.num_ranks)))
