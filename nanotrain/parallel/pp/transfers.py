"""The plan of one rank for one step: its actions and its transfers, in order.

Hidden states and gradients are sent over one group, on which NCCL runs transfers one after another.
All ranks must therefore agree on the order of transfers, or two of them deadlock. The order is that
of a simulated clock. A transfer is due when its producer ends there, and every rank starts its
sends and receives in the order in which they are due.

    clock   0         1         2         3         4
    rank 0  |  F0.0   |  F0.1   |                   |      B0.0 ..
                      v         v                   ^
    rank 1            |  F1.0   |       B1.0        |  F1.1   | ..

    rank 0 sends for F1.0 at 1 and for F1.1 at 2, and receives for B0.0 at 4;
    rank 1 receives at 1 for F1.0, during B1.0 for F1.1, and sends at 4

Transfers due at the same time form one batch, so two ranks may send to each other. A transfer due
while its receiver computes is received meanwhile: the receive is started before that action. There
is no deadlock, whatever the real times, as a transfer only waits for transfers and actions that are
due earlier.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from nanotrain.parallel.pp.actions import Action, ActionKind, Pair, Schedule
from nanotrain.parallel.pp.simulate import Timeline, simulate


@dataclass(frozen=True)
class Transfer:
    """A message from one rank to another."""

    # the action that takes it: F takes hidden states, B and I the gradient of the stage's output
    to: Action
    peer: int  # the other rank of the pipeline


@dataclass(frozen=True)
class TransferBatch:
    """Transfers that a rank starts together."""

    sends: tuple[Transfer, ...]  # the result of the previous action, or the two of a pair
    # results that other ranks complete at the same time on the simulated clock
    receives: tuple[Transfer, ...]


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of a schedule."""

    steps: tuple[Action | Pair | TransferBatch, ...]  # actions and transfers, in order
    # for each action of the rank whose result another stage takes, the action that takes it
    consumers: Mapping[Action, Action]
    # for each stage the action that completes its weight gradients
    last_backwards: frozenset[Action]
    num_stages: int  # stages of the pipeline
    num_microbatches: int  # microbatches of the step
    # stages before it have no parameter that is trained, and no backward
    first_trained_stage: int = 0

    @property
    def actions(self) -> Iterator[Action]:
        """The actions of the rank, in order."""
        for step in self.steps:
            if isinstance(step, Action):
                yield step
            elif isinstance(step, Pair):
                yield from step

    @property
    def defers_wgrad(self) -> bool:
        """Whether there are W actions, so that linear layers defer their weight gradients."""
        return any(action.kind is ActionKind.backward_weight for action in self.actions)


def plan_rank(schedule: Schedule, pp_rank: int, *, first_trained_stage: int = 0) -> RankPlan:
    """Plan the actions and transfers of one rank.

    Args:
        schedule: the actions of all ranks.
        pp_rank: index of the rank in the pipeline.
        first_trained_stage: stage before which all parameters are frozen: no earlier stage runs a
            backward or receives a gradient.

    Raises:
        ScheduleError: a schedule that is incomplete or deadlocks.

    >>> from nanotrain.parallel.pp.actions import PipelineShape
    >>> from nanotrain.parallel.pp.schedules import forward_only, gpipe
    >>> for step in plan_rank(forward_only(gpipe(PipelineShape(2, 1, 2))), 1).steps:
    ...     is_batch = isinstance(step, TransferBatch)
    ...     print([str(transfer.to) for transfer in step.receives] if is_batch else step)
    ['F1.0']
    F1.0
    ['F1.1']
    F1.1
    """
    timeline = simulate(schedule)
    consumers = {}
    for action in schedule.actions[pp_rank]:
        consumer = schedule.consumer_of(action)
        if consumer is not None and _runs(consumer, first_trained_stage):
            consumers[action] = consumer
    steps = _steps(schedule, timeline, pp_rank=pp_rank)
    return RankPlan(
        steps=tuple(_without_frozen_stages(steps, first_trained_stage)),
        consumers=consumers,
        last_backwards=schedule.last_backwards(pp_rank),
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        first_trained_stage=first_trained_stage,
    )


def _runs(action: Action, first_trained_stage: int) -> bool:
    """Whether an action has something to compute: a forward, or a backward of a trained stage."""
    return action.kind is ActionKind.forward or action.stage >= first_trained_stage


def _without_frozen_stages(
    steps: Iterable[Action | Pair | TransferBatch], first_trained_stage: int
) -> Iterator[Action | Pair | TransferBatch]:
    """The steps without backwards of stages before the first trained one, and without their
    transfers.
    """

    def running(transfers: Iterable[Transfer]) -> tuple[Transfer, ...]:
        return tuple(sent for sent in transfers if _runs(sent.to, first_trained_stage))

    for step in steps:
        if isinstance(step, TransferBatch):
            batch = TransferBatch(running(step.sends), running(step.receives))
            if batch.sends or batch.receives:
                yield batch
        elif isinstance(step, Action):
            if _runs(step, first_trained_stage):
                yield step
        elif all(_runs(action, first_trained_stage) for action in step):
            yield step
        else:
            yield step.forward


def _steps(
    schedule: Schedule, timeline: Timeline, *, pp_rank: int
) -> Iterator[Action | Pair | TransferBatch]:
    """The steps of a rank: its actions, each after the transfers that are due before its end."""
    batches = _transfers(schedule, timeline, pp_rank=pp_rank)
    due = deque(sorted(batches))
    complete = {span.action: span.complete for span in timeline.spans[pp_rank]}
    for step in schedule.steps(pp_rank):
        action = step.forward if isinstance(step, Pair) else step
        while due and due[0] < complete[action]:
            yield batches[due.popleft()]
        yield step
    for time in due:
        yield batches[time]


def _transfers(
    schedule: Schedule, timeline: Timeline, *, pp_rank: int
) -> dict[float, TransferBatch]:
    """The transfers of a rank by the time at which they are due."""
    sends: dict[float, list[Transfer]] = defaultdict(list)
    receives: dict[float, list[Transfer]] = defaultdict(list)
    for source, spans in enumerate(timeline.spans):
        for span in spans:
            to = schedule.consumer_of(span.action)
            if to is None:
                continue
            target = schedule.rank_of_stage[to.stage]
            if source == pp_rank != target:
                sends[span.complete].append(Transfer(to, target))
            elif target == pp_rank != source:
                receives[span.complete].append(Transfer(to, source))
    return {
        time: TransferBatch(tuple(sends[time]), tuple(receives[time]))
        for time in {*sends, *receives}
    }
