"""The pipeline schedules by name, each a pure function from a `PipelineShape` to a `Schedule`.

p ranks, v stages per rank, m microbatches

name         peak microbatches in flight, rank r of p   bubble / ideal time
gpipe        m                                          (p - 1) / m
1f1b         p - r                                      (p - 1) / m
interleaved  (2(p - r - 1) + (v - 1)p + 1) / v          (p - 1) / (v m)
zb-h1        p - r, and r more without their input      (p - 1)(F + I - W) / (m (F + I + W))
zb-v         p                                          (p - 1) / (6 m)
dualpipev    p + 1/2                                    (p - 1) / (6 m)

zb-v and dualpipev are in `v_schedules.py`; they have v = 2, and F, I and W take equally long.

A new schedule is one function and one row of SCHEDULES. All schedules accumulate microbatches in
the same order, so gradients are bit-equal.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise

from nanotrain.errors import ScheduleError
from nanotrain.parallel.pp.actions import (
    Action,
    ActionKind,
    Pair,
    PipelineShape,
    Schedule,
    backward_input,
    backward_weight,
    forward,
    full_backward,
)
from nanotrain.parallel.pp.v_schedules import dualpipe_v, zb_v


def gpipe(shape: PipelineShape) -> Schedule:
    """All forwards, then all backwards; any number of stages per rank.

    Huang et al. 2019, section 2.3.

        rank 0  F0.F1.F2.         B0====B1====B2====
        rank 1     F0.F1.F2.B0====B1====B2====

    Backwards run in the order of the forwards, not reversed as in the paper, for the same bubble.

    >>> [str(action) for action in gpipe(PipelineShape(2, 1, 2)).actions[1]]
    ['F1.0', 'F1.1', 'B1.0', 'B1.1']
    """
    actions = []
    for rank in range(shape.num_ranks):
        actions.append(forwards_of(shape, rank) + backwards_of(shape, rank))
    return Schedule(tuple(actions))


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of a schedule in their order and no backward, for validation.

    >>> [str(action) for action in forward_only(gpipe(PipelineShape(2, 2, 1))).actions[1]]
    ['F1.0', 'F3.0']
    """
    forwards = []
    for actions in schedule.actions:
        forwards.append(tuple(a for a in actions if a.kind is ActionKind.forward))
    return Schedule(tuple(forwards))


def one_f_one_b(shape: PipelineShape) -> Schedule:
    """One forward, one backward; one stage per rank (Narayanan et al. 2019, section 3.2).

        rank 0  F0.F1.      B0====F2.B1====F3.B2====   B3====
        rank 1     F0.B0====F1.B1====F2.B2====F3.B3====

    The bubble of GPipe, but rank r keeps the activations of at most `num_ranks - r` microbatches;
    with pairs twice as many, as every result takes the time of two actions.

    Raises:
        ScheduleError: several stages per rank.

    >>> shape = PipelineShape(num_ranks=2, num_stages_per_rank=1, num_microbatches=3)
    >>> [str(action) for action in one_f_one_b(shape).actions[0]]
    ['F0.0', 'F0.1', 'B0.0', 'F0.2', 'B0.1', 'B0.2']
    """
    _require_one_stage_per_rank("1f1b", shape)
    if shape.has_pairs:
        return _alternate(shape, warmups=warmups(shape))
    return _alternate(shape, warmups=reversed(range(shape.num_ranks)))


def interleaved(shape: PipelineShape) -> Schedule:
    """1F1B over at least two stages per rank, which shortens the warmup.

        2 ranks with 2 stages each, a and b;
        hidden states pass a of rank 0, a of rank 1, b of rank 0, b of rank 1

        rank 0  F0a.F1a.F0b.F1b.F2a.    B0b=====F3a.B1b=====F2b.B0a=====F3b.B1a=====    ..
        rank 1      F0a.F1a.F0b.B0b=====F1b.B1b=====F2a.B0a=====F3a.B1a=====F2b.B2b=====..

    A rank runs `num_ranks` microbatches through one of its stages, then through the next: by then
    the first of them has passed the other ranks. The bubble shrinks by the number of stages per
    rank, and hidden states are sent that many times.

    Megatron-LM supports only multiples of `num_ranks` microbatches. Here other counts are split
    into as many rounds as fit, whose sizes differ by at most one (`split_rounds`); with equal
    rounds this is torch's ScheduleInterleaved1F1B. Longer rounds keep more microbatches in flight.

    Narayanan et al. 2021, section 2.2.

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
    return _alternate(shape, warmups=warmups(shape))


def zero_bubble_h1(shape: PipelineShape) -> Schedule:
    """1F1B with split backwards and weight gradients in the bubble.

    Qi et al. 2023, section 2.2 and appendix.

        rank 0  F0.F1.   I0=W0-F2.I1=W1-F3.I2=W2-I3=W3-
        rank 1     F0.I0=F1.I1=W0-F2.I2=W1-F3.I3=W2-W3-

    I computes the gradient of the stage's input, for which the previous rank waits; W computes the
    weight gradients. Rank r delays W by r microbatches, which fills its bubble. Together with the
    `num_ranks - r` microbatches in flight, as in 1F1B, it keeps no more microbatches than the first
    rank. On a single rank, which has no bubble, it is 1F1B.

    Raises:
        ScheduleError: several stages per rank.

    >>> shape = PipelineShape(num_ranks=2, num_stages_per_rank=1, num_microbatches=2)
    >>> [str(action) for action in zero_bubble_h1(shape).actions[1]]
    ['F1.0', 'I1.0', 'F1.1', 'I1.1', 'W1.0', 'W1.1']
    """
    _require_one_stage_per_rank("zb-h1", shape)
    schedule = one_f_one_b(shape)
    if shape.num_ranks == 1:
        return schedule
    return Schedule(
        tuple(_split(actions, delay=rank) for rank, actions in enumerate(schedule.actions))
    )


SCHEDULES: dict[str, Callable[[PipelineShape], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zero_bubble_h1,
    "zb-v": zb_v,
    "dualpipev": dualpipe_v,
}


def build_schedule(name: str, shape: PipelineShape) -> Schedule:
    """The schedule `name`, or for a single stage 1f1b.

    1f1b keeps the activations of one microbatch at a time.

    Raises:
        ScheduleError: a number of stages per rank that the schedule does not support.

    >>> [str(action) for action in build_schedule("gpipe", PipelineShape(1, 1, 2))]
    ['F0.0', 'B0.0', 'F0.1', 'B0.1']
    """
    if shape.num_stages == 1:
        return one_f_one_b(shape)
    return SCHEDULES[name](shape)


def warmups(shape: PipelineShape) -> list[int]:
    """The number of warmup forwards of each rank (`num_warmup`)."""
    return [num_warmup(shape, rank) for rank in range(shape.num_ranks)]


def num_warmup(shape: PipelineShape, rank: int) -> int:
    """Forwards of a rank before its first forward that is followed by a backward.

    Two more for every rank that follows, as in Megatron-LM. If transfers took no time, one more
    would be enough; the second one overlaps the transfers. Simulated with a tenth of a forward per
    transfer, 8 ranks with 4 stages each and 32 microbatches take the time of 411 forwards instead
    of 429, and keep up to `num_ranks - 1` more microbatches.

    >>> [num_warmup(PipelineShape(4, 2, 8), rank) for rank in range(4)]
    [10, 8, 6, 4]
    """
    first_round = split_rounds(shape)[0]
    warmup = 2 * (shape.num_ranks - rank - 1)
    warmup += (shape.num_stages_per_rank - 1) * len(first_round)
    if shape.has_pairs:
        # On the last stage too the backward of a pair is of an earlier microbatch than its forward.
        warmup += 1
    return warmup


def split_rounds(shape: PipelineShape) -> list[range]:
    """The microbatches of each round: as many rounds as have at least `num_ranks` each.

    The sizes of the rounds differ by at most one.
    A last round of the remaining microbatches would leave the ranks idle: with 9 microbatches on 8
    ranks with 4 stages a step takes 172 instead of 129 forwards (simulated).

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
    return tuple(
        forward(stage, m)
        for part in split_rounds(shape)
        for stage in shape.stages_of(rank)
        for m in part
    )


def backwards_of(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    """The backwards of a rank in the rounds of its forwards, the last stage of the rank first.

    >>> [str(action) for action in backwards_of(PipelineShape(2, 2, 4), 0)]
    ['B2.0', 'B2.1', 'B0.0', 'B0.1', 'B2.2', 'B2.3', 'B0.2', 'B0.3']
    """
    stages = shape.stages_of(rank)[::-1]
    return tuple(
        full_backward(stage, m) for part in split_rounds(shape) for stage in stages for m in part
    )


def _alternate(shape: PipelineShape, *, warmups: Iterable[int]) -> Schedule:
    """Actions per rank: warmup forwards, alternating forwards and backwards, then backwards."""
    actions = []
    all_pairs: set[Pair] = set()
    for rank, warmup in enumerate(warmups):
        forwards = forwards_of(shape, rank)
        backwards = backwards_of(shape, rank)
        pairs = [Pair(*both) for both in zip(forwards[warmup:], backwards, strict=False)]
        if shape.has_pairs:
            all_pairs.update(pairs)
        steady = tuple(chain.from_iterable(pairs))
        actions.append(forwards[:warmup] + steady + backwards[len(pairs) :])
    return Schedule(tuple(actions), frozenset(all_pairs))


def _require_one_stage_per_rank(name: str, shape: PipelineShape) -> None:
    """Raise ScheduleError if ranks have several stages."""
    if shape.num_stages_per_rank > 1:
        raise ScheduleError(
            f"the schedule {name} has {shape.num_stages_per_rank} stages per rank",
            why="it supports one; interleaved is 1f1b with several",
            fix="set --pipeline-schedule interleaved or --num-virtual-stages-per-pipeline-rank 1",
        )


def _split(actions: Sequence[Action], *, delay: int) -> tuple[Action, ...]:
    """Replace each B by I and the W of `delay` microbatches before; other W come last."""
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
