"""What one rank does in a step, transfers included: planned from the schedule, before anything runs.

Hidden states and gradients travel over one group, in which NCCL runs transfers one after another. So all ranks have to
agree on their order, or two of them wait for each other for ever. The order is that of a simulated clock: a message is
due when its producer ends there, and every rank starts its transfers, sends and receives alike, as they are due.

    clock   0         1         2         3         4
    rank 0  |  F0.0   |  F0.1   |                   |      B0.0 ..
                      v         v                   ^
    rank 1            |  F1.0   |       B1.0        |  F1.1   | ..

    rank 0 sends for F1.0 at 1 and for F1.1 at 2, and receives for B0.0 at 4;
    rank 1 receives at 1; it receives for F1.1 beside B1.0; and sends at 4

What is due at one instant goes in one batch, so that two ranks may send to each other. A message that is due while its
receiver computes is received meanwhile: the receive is started before that action. No rank ever waits in a circle: a
transfer waits for things that are due earlier, and only for those, whatever the real times are.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from nanotrain.parallel.pp.actions import Action, ActionKind, Schedule, backward, forward
from nanotrain.parallel.pp.simulate import Timeline, simulate


@dataclass(frozen=True)
class Transfer:
    """A message that crosses from one rank to another.

    Attributes:
        to: the action it is for: a forward pass takes hidden states, a backward pass the gradient of its output.
        peer: the other rank of the pipeline.
    """

    to: Action
    peer: int


@dataclass(frozen=True)
class Exchange:
    """Transfers that a rank starts at once.

    Attributes:
        sends: at most one, what the action before has made.
        receives: what others make at the same time on the simulated clock.
    """

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


@dataclass(frozen=True)
class RankPlan:
    """A rank's part of a schedule.

    Attributes:
        steps: actions and exchanges, in order.
        last_backwards: for each stage the action after which its gradients are complete.
        is_split: whether weight gradients are actions of their own.
        num_stages: stages of the whole pipeline.
    """

    steps: tuple[Action | Exchange, ...]
    last_backwards: frozenset[Action]
    is_split: bool
    num_stages: int


def consumer_of(action: Action, *, num_stages: int) -> Action | None:
    """The action of another stage that takes what this one makes.

    >>> str(consumer_of(forward(0, 3), num_stages=2)), str(consumer_of(backward(1, 3), num_stages=2))
    ('F1.3', 'B0.3')
    """
    if action.kind is ActionKind.forward and action.stage < num_stages - 1:
        return forward(action.stage + 1, action.microbatch)
    if action.kind is ActionKind.backward and action.stage > 0:
        return backward(action.stage - 1, action.microbatch)
    return None


@lru_cache(maxsize=32)
def plan_rank(schedule: Schedule, rank: int) -> RankPlan:
    """Plan the actions and transfers of one rank.

    Raises:
        ScheduleError: a schedule that does not come to its end.

    >>> from nanotrain.parallel.pp.actions import PipelineShape
    >>> from nanotrain.parallel.pp.gpipe import forward_only
    >>> for step in plan_rank(forward_only(PipelineShape(2, 1, 2)), 1).steps:
    ...     print(step if isinstance(step, Action) else [str(transfer.to) for transfer in step.receives])
    ['F1.0']
    F1.0
    ['F1.1']
    F1.1
    """
    timeline = simulate(schedule)
    return RankPlan(
        steps=tuple(_steps(schedule, timeline, rank=rank)),
        last_backwards=schedule.last_backwards(rank),
        is_split=schedule.has_weight_actions,
        num_stages=schedule.num_stages,
    )


def _steps(schedule: Schedule, timeline: Timeline, *, rank: int) -> Iterator[Action | Exchange]:
    """Each action, after the exchanges that are due before it ends."""
    exchanges = _exchanges(schedule, timeline, rank=rank)
    due = sorted(exchanges)
    for span in timeline.spans[rank]:
        while due and due[0] < span.end:
            yield exchanges[due.pop(0)]
        yield span.action
    yield from (exchanges[time] for time in due)


def _exchanges(schedule: Schedule, timeline: Timeline, *, rank: int) -> dict[float, Exchange]:
    """The transfers of a rank by the time at which they are due."""
    homes = {action.stage: home for home, actions in enumerate(schedule.actions) for action in actions}
    sends: dict[float, list[Transfer]] = defaultdict(list)
    receives: dict[float, list[Transfer]] = defaultdict(list)
    for source, spans in enumerate(timeline.spans):
        for span in spans:
            to = consumer_of(span.action, num_stages=schedule.num_stages)
            if to is None or homes[to.stage] == source:
                continue
            if source == rank:
                sends[span.end].append(Transfer(to, homes[to.stage]))
            elif homes[to.stage] == rank:
                receives[span.end].append(Transfer(to, source))
    return {time: Exchange(tuple(sends[time]), tuple(receives[time])) for time in {*sends, *receives}}
