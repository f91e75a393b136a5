"""Interleaved 1F1B: several stages per rank, so the pipeline fills in smaller steps (Narayanan et al. 2021, 2.2).

    2 ranks with 2 stages each; hidden states pass stage a of rank 0, a of rank 1, b of rank 0, b of rank 1

    rank 0  F0a.F1a.F0b.F1b.F2a.    B0b=====F3a.B1b=====F2b.B0a=====F3b.B1a=====    ..
    rank 1      F0a.F1a.F0b.B0b=====F1b.B1b=====F2a.B0a=====F3a.B1a=====F2b.B2b=====..

A rank takes its stages in turns of `num_ranks` microbatches: by then the first of them has come around the ring. The
bubble shrinks by the number of stages per rank; hidden states travel that many times more often.

Megatron-LM's schedule takes multiples of `num_ranks` microbatches only. Other counts are planned as the next multiple
and the actions of the microbatches that do not exist left out: microbatches depend on each other in no way, so what
remains is still in a valid order and holds no more activations.
"""

from collections.abc import Sequence
from dataclasses import replace

from nanotrain.errors import ScheduleError
from nanotrain.parallel.pp.actions import Action, PipelineShape, Schedule, backward, forward


def interleaved(shape: PipelineShape) -> Schedule:
    """1F1B over at least two stages per rank.

    Raises:
        ScheduleError: fewer than two stages per rank.

    >>> shape = PipelineShape(num_ranks=2, num_stages_per_rank=2, num_microbatches=2)
    >>> [str(action) for action in interleaved(shape).actions[1]]
    ['F1.0', 'F1.1', 'F3.0', 'B3.0', 'F3.1', 'B3.1', 'B1.0', 'B1.1']
    """
    if shape.num_stages_per_rank < 2 and shape.num_ranks > 1:
        raise ScheduleError(
            "the schedule interleaved has one stage per rank",
            why="it takes turns between several stages of a rank; with one it is 1f1b",
            fix="set --num-virtual-stages-per-pipeline-rank 2 or --pipeline-schedule 1f1b",
        )
    return Schedule(tuple(_of_rank(shape, rank) for rank in range(shape.num_ranks)))


def num_warmup(shape: PipelineShape, rank: int) -> int:
    """Forward passes of a rank before its first pair of one forward and one backward.

    Two more per rank that follows, as Megatron-LM has it. One more would fill the pipeline too if transfers took no
    time; the second hides them: with a tenth of a forward pass each, 8 ranks with 4 stages and 32 microbatches take
    411 in place of 429 forward passes (simulated), for the memory of up to `num_ranks - 1` more.

    >>> [num_warmup(PipelineShape(4, 2, 8), rank) for rank in range(4)]
    [10, 8, 6, 4]
    """
    return 2 * (shape.num_ranks - rank - 1) + (shape.num_stages_per_rank - 1) * shape.num_ranks


def forwards_of(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    """The forward passes of a rank: turns of `num_ranks` microbatches through each of its stages.

    >>> [str(action) for action in forwards_of(PipelineShape(2, 2, 3), 0)]
    ['F0.0', 'F0.1', 'F2.0', 'F2.1', 'F0.2', 'F2.2']
    """
    return tuple(forward(stage, m) for turn in _turns(shape) for stage in shape.stages_of(rank) for m in turn)


def backwards_of(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    """The backward passes of a rank: the same turns, its last stage first.

    >>> [str(action) for action in backwards_of(PipelineShape(2, 2, 3), 0)]
    ['B2.0', 'B2.1', 'B0.0', 'B0.1', 'B2.2', 'B0.2']
    """
    return tuple(backward(stage, m) for turn in _turns(shape) for stage in shape.stages_of(rank)[::-1] for m in turn)


def one_by_one(forwards: Sequence[Action], backwards: Sequence[Action], *, warmup: int) -> tuple[Action, ...]:
    """`warmup` forward passes, then pairs of a forward and a backward, then the backward passes that are left."""
    warmup = min(warmup, len(forwards))
    pairs = zip(forwards[warmup:], backwards, strict=False)
    steady = [action for pair in pairs for action in pair]
    return (*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :])


def _turns(shape: PipelineShape) -> list[range]:
    """The microbatches of each turn: `num_ranks` of them, and in the last turn what is left."""
    count = shape.num_microbatches
    return [range(m, min(m + shape.num_ranks, count)) for m in range(0, count, shape.num_ranks)]


def _of_rank(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    full = replace(shape, num_microbatches=-(-shape.num_microbatches // shape.num_ranks) * shape.num_ranks)
    actions = one_by_one(forwards_of(full, rank), backwards_of(full, rank), warmup=num_warmup(full, rank))
    return tuple(action for action in actions if action.microbatch < shape.num_microbatches)
