"""Interleaved 1F1B: several stages per rank, which shortens the warmup (Narayanan et al. 2021, section 2.2).

    2 ranks with 2 stages each, a and b; hidden states pass a of rank 0, a of rank 1, b of rank 0, b of rank 1

    rank 0  F0a.F1a.F0b.F1b.F2a.    B0b=====F3a.B1b=====F2b.B0a=====F3b.B1a=====    ..
    rank 1      F0a.F1a.F0b.B0b=====F1b.B1b=====F2a.B0a=====F3a.B1a=====F2b.B2b=====..

A rank runs `num_ranks` microbatches through one of its stages, then through the next: by then the first of them has
passed the other ranks. The bubble shrinks by the number of stages per rank, and hidden states are sent that many times.

Megatron-LM supports only multiples of `num_ranks` microbatches. Here other counts are split into as many rounds as fit,
whose sizes differ by at most one (`split_rounds`); with equal rounds this is torch's ScheduleInterleaved1F1B. Longer
rounds keep more microbatches in flight.
"""

from collections.abc import Sequence
from itertools import pairwise

from nanotrain.errors import ScheduleError
from nanotrain.parallel.pp.actions import Action, PipelineShape, Schedule, forward, full_backward


def interleaved(shape: PipelineShape) -> Schedule:
    """1F1B over at least two stages per rank.

    Raises:
        ScheduleError: one stage per rank.

    >>> shape = PipelineShape(num_ranks=2, num_stages_per_rank=2, num_microbatches=2)
    >>> [str(action) for action in interleaved(shape).actions[1]]
    ['F1.0', 'F1.1', 'F3.0', 'B3.0', 'F3.1', 'B3.1', 'B1.0', 'B1.1']
    """
    if shape.num_stages_per_rank < 2 and shape.num_ranks > 1:
        raise ScheduleError(
            "the schedule interleaved has one stage per rank",
            why="it interleaves several stages of a rank; with one stage it is 1f1b",
            fix="set --num-virtual-stages-per-pipeline-rank 2 or --pipeline-schedule 1f1b",
        )
    return Schedule(tuple(_actions_of(shape, rank) for rank in range(shape.num_ranks)))


def num_warmup(shape: PipelineShape, rank: int) -> int:
    """Forwards of a rank before its first pair of one forward and one backward.

    Two more for every rank that follows, as in Megatron-LM. If transfers took no time, one more would be enough; the
    second one overlaps the transfers. Simulated with a tenth of a forward per transfer, 8 ranks with 4 stages each and
    32 microbatches take the time of 411 forwards instead of 429, and keep up to `num_ranks - 1` more microbatches.

    >>> [num_warmup(PipelineShape(4, 2, 8), rank) for rank in range(4)]
    [10, 8, 6, 4]
    """
    return 2 * (shape.num_ranks - rank - 1) + (shape.num_stages_per_rank - 1) * len(split_rounds(shape)[0])


def split_rounds(shape: PipelineShape) -> list[range]:
    """The microbatches of each round: at least `num_ranks` in each of as many rounds as possible, of nearly equal size.

    A last round of the remaining microbatches would leave the ranks idle: with 9 microbatches on 8 ranks with 4 stages
    a step takes 172 instead of 129 forwards (simulated).

    >>> split_rounds(PipelineShape(4, 2, 11))
    [range(0, 6), range(6, 11)]
    """
    num_rounds = max(1, shape.num_microbatches // shape.num_ranks)
    size, num_longer = divmod(shape.num_microbatches, num_rounds)
    starts = [i * size + min(i, num_longer) for i in range(num_rounds + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def forwards_of(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    """The forwards of a rank: rounds of microbatches through each of its stages.

    >>> [str(action) for action in forwards_of(PipelineShape(2, 2, 4), 0)]
    ['F0.0', 'F0.1', 'F2.0', 'F2.1', 'F0.2', 'F0.3', 'F2.2', 'F2.3']
    """
    return tuple(forward(stage, m) for part in split_rounds(shape) for stage in shape.stages_of(rank) for m in part)


def backwards_of(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    """The backwards of a rank: the same rounds, its last stage first.

    >>> [str(action) for action in backwards_of(PipelineShape(2, 2, 4), 0)]
    ['B2.0', 'B2.1', 'B0.0', 'B0.1', 'B2.2', 'B2.3', 'B0.2', 'B0.3']
    """
    stages = shape.stages_of(rank)[::-1]
    return tuple(full_backward(stage, m) for part in split_rounds(shape) for stage in stages for m in part)


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], *, warmup: int) -> tuple[Action, ...]:
    """`warmup` forwards, then pairs of a forward and a backward, then the remaining backwards."""
    warmup = min(warmup, len(forwards))
    pairs = zip(forwards[warmup:], backwards, strict=False)
    steady = [action for pair in pairs for action in pair]
    return (*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :])


def _actions_of(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    return alternate(forwards_of(shape, rank), backwards_of(shape, rank), warmup=num_warmup(shape, rank))
