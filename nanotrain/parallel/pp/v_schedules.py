"""Schedules of two stages per rank in a V: from the first rank to the last, then back.

    rank     0   1   2   3         p = 4 ranks
    a        0   1   2   3         the rank's first stage
    b        7   6   5   4         the second one: the last stage, with the loss, is on rank 0

zb_v          backwards split throughout, no bubble but the fill of the pipeline
dualpipe_v    a forward overlaps a full backward of the other direction in the steady state

A rank's order is written as phases: actions, and how often they run. The n-th action of a kind on a
stage is that of microbatch n; W is the oldest that an I has left. With few microbatches the order
is that of more, without the others.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from nanotrain.errors import ScheduleError
from nanotrain.parallel.pp.actions import (
    Action,
    ActionKind,
    Pair,
    PipelineShape,
    Schedule,
    backward_weight,
)

Phase = tuple[str, int]  # actions by kind and stage, as "Fa Ib W", and how often they run


def zb_v(shape: PipelineShape) -> Schedule:
    """ZB-V: zero bubble with the memory of 1F1B (Qi et al. 2023, section 6; 2024, section 4.2).

        rank 0  F0a.F1a.F2a.F0b.I0b=W0b-F1b.I1b=W1b-F3a.I0a=W0a-F2b.I2b=W2b-F4a.I1a=W1a-..
        rank 1      F0a.F0b.F1a.F1b.I0b=W0b-F2a.I0a=W0a-F2b.I1b=W1b-F3a.I1a=W1a-F3b.I2b=..

    Where F, I and W take equally long, ranks wait only while the pipeline fills, for p - 1 of 6 m +
    p - 1 units. Rank r keeps at most 2p inputs and activations of half of a rank's layers, as many
    bytes as the first rank of 1F1B.

    Raises:
        ScheduleError: other than two stages per rank.

    >>> [str(action) for action in zb_v(PipelineShape(2, 2, 1)).actions[1]]
    ['F1.0', 'F2.0', 'I2.0', 'W2.0', 'I1.0', 'W1.0']
    """
    p = shape.num_ranks
    num_microbatches = max(shape.num_microbatches, 2 * p - 1)
    phases = [
        (
            ("Fa", 2 * (p - rank) - 1),
            ("Fb Fa", rank),
            ("Fb Ib W", p - rank),
            ("Fa Ia W Fb Ib W", num_microbatches - 2 * p + rank + 1),
            ("Ia W Fb Ib W", p - rank - 1),
            ("Ia Ib", rank),
            ("Ia W", p - rank),
            ("W", 2 * rank),
        )
        for rank in range(p)
    ]
    return _v_schedule("zb-v", shape, phases=phases)


def dualpipe_v(shape: PipelineShape) -> Schedule:
    """DualPipeV: half of DualPipe (DeepSeek-AI 2024, section 3.2.1; the DualPipe repository).

        rank 0  F0a.F1a.F2a.F0b.I0b=W0b-F1b.F3a.B1b=====F2b.B0a=====F4a.B2b=====F3b.B1a=====..
        rank 1      F0a.F0b.F1a.F1b.F2a.B0b=====F2b.B0a=====F3a.B1b=====F3b.B1a=====F4a.B2b=..

    In the steady state a rank runs a forward and a backward that do not depend on each other, one
    on each of its stages. Rank r keeps at most 2p + 1 activations of half of a rank's layers.

    Raises:
        ScheduleError: other than two stages per rank.

    >>> [str(action) for action in dualpipe_v(PipelineShape(1, 2, 2)).actions[0]]
    ['F0.0', 'F1.0', 'F0.1', 'B1.0', 'F1.1', 'B0.0', 'B1.1', 'I0.1', 'W0.1']
    """
    p = shape.num_ranks
    num_microbatches = max(shape.num_microbatches, 2 * p)
    phases = [
        (
            ("Fa", 2 * (p - rank - 1)),
            ("Fa Fb", rank + 1),
            ("Ib W Fb", p - rank - 1),
            ("Fa Bb Fb Ba", num_microbatches - 2 * p + rank + 1),
            ("Bb Fb Ba", p - rank - 1),
            ("Bb Ba", (rank + 1) // 2),
            ("Bb Ia", (rank + 1) % 2),
            ("Ib Ia", (rank + 1) // 2),
            ("W Ia", p - rank - 1),
            ("W", rank + 1),
        )
        for rank in range(p)
    ]
    return _v_schedule("dualpipev", shape, phases=phases)


def _v_schedule(name: str, shape: PipelineShape, *, phases: Sequence[Sequence[Phase]]) -> Schedule:
    """The actions of every rank from its phases, without microbatches beyond the step's."""
    num_stages_per_rank = shape.num_stages_per_rank
    if num_stages_per_rank != 2:
        raise ScheduleError(
            f"--pipeline-schedule {name} with "
            f"--num-virtual-stages-per-pipeline-rank {num_stages_per_rank}",
            why="every rank holds two: one on the way to the last rank and one on the way back",
            fix="set --num-virtual-stages-per-pipeline-rank 2 or another --pipeline-schedule",
        )
    kept = []
    pairs: set[Pair] = set()
    is_complete = True
    for rank, rank_phases in enumerate(phases):
        stages = {"a": rank, "b": shape.num_stages - 1 - rank}
        actions = list(_numbered_actions(rank_phases, stages))
        rank_actions = tuple(a for a in actions if a.microbatch < shape.num_microbatches)
        kept.append(rank_actions)
        pairs.update(_pairs(rank_actions))
        is_complete = is_complete and len(rank_actions) == len(actions)
    # With microbatches left out, pairs would wait for each other.
    has_pairs = shape.has_pairs and is_complete
    return Schedule(tuple(kept), frozenset(pairs) if has_pairs else frozenset())


def _pairs(actions: Sequence[Action]) -> Iterator[Pair]:
    """Forwards, each with the full backward that follows it."""
    for first, second in pairwise(actions):
        if first.kind is ActionKind.forward and second.kind is ActionKind.full_backward:
            yield Pair(first, second)


def _letters(phases: Sequence[Phase]) -> Iterator[str]:
    """The actions of phases in order, as "Fa", "Ib" or "W"."""
    for letters, times in phases:
        for _ in range(times):
            yield from letters.split()


def _numbered_actions(phases: Sequence[Phase], stages: Mapping[str, int]) -> Iterator[Action]:
    """The actions of phases, with the stages of the letters a and b and with microbatches."""
    numbers: Counter[tuple[bool, int]] = Counter()
    deferred: deque[Action] = deque()
    for letters in _letters(phases):
        if letters == "W":
            yield deferred.popleft()
            continue
        kind = ActionKind(letters[0])
        stage = stages[letters[1]]
        microbatch = numbers[kind.has_dgrad, stage]
        numbers[kind.has_dgrad, stage] += 1
        if kind is ActionKind.backward_input:
            deferred.append(backward_weight(stage, microbatch))
        yield Action(kind, stage, microbatch)
