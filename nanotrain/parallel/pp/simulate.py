"""Plays a schedule through without a device: does it come to an end, how long does it take, what does it hold?

Every rank takes its actions in order, each as soon as what it needs is there:

    F of a stage   after F of the stage before          B   after B of the stage after, and its own F
    W              after its own B

A schedule in which every rank waits for another, or in which a pass is missing or doubled, is an error here and would
be a hang or a wrong gradient there.
"""

from collections import Counter
from dataclasses import dataclass

from nanotrain.errors import ScheduleError
from nanotrain.parallel.pp.actions import Action, ActionKind, Schedule, backward, forward


@dataclass(frozen=True)
class Costs:
    """Time that one stage takes for one microbatch, in any unit.

    Attributes:
        forward: a forward pass.
        backward: a whole backward pass; the input gradients alone take `backward - weight`.
        weight: the weight gradients.
        transfer: from one rank to another, beside the computation.
    """

    forward: float = 1
    backward: float = 2
    weight: float = 1
    transfer: float = 0

    def of(self, kind: ActionKind, *, is_split: bool) -> float:
        """Time of one action; `is_split` where weight actions stand apart."""
        split = {ActionKind.backward: self.backward - self.weight} if is_split else {}
        whole = {
            ActionKind.forward: self.forward,
            ActionKind.backward: self.backward,
            ActionKind.weight: self.weight,
        }
        return (whole | split)[kind]


UNIT_COSTS = Costs()


@dataclass(frozen=True)
class Span:
    """When an action runs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What `simulate` found.

    Attributes:
        spans: for each rank its actions with their times, in order.
    """

    spans: tuple[tuple[Span, ...], ...]

    @property
    def duration(self) -> float:
        """Until the last action of any rank ends."""
        return max((spans[-1].end for spans in self.spans if spans), default=0)

    @property
    def bubble_fraction(self) -> float:
        """Share of the time of all ranks in which they wait, at the ends as well."""
        busy = sum(span.end - span.start for spans in self.spans for span in spans)
        whole = self.duration * len(self.spans)
        return (whole - busy) / whole if whole else 0.0

    @property
    def peak_alive(self) -> tuple[int, ...]:
        """For each rank the most (stage, microbatch) pairs that were at once between forward and backward."""
        return self._peaks(ActionKind.backward)

    @property
    def peak_held(self) -> tuple[int, ...]:
        """The same until the weight gradients, where these stand apart: something is kept until then."""
        is_split = any(span.action.kind is ActionKind.weight for spans in self.spans for span in spans)
        return self._peaks(ActionKind.weight if is_split else ActionKind.backward)

    def _peaks(self, last: ActionKind) -> tuple[int, ...]:
        peaks = []
        for spans in self.spans:
            alive = peak = 0
            for span in spans:
                alive += (span.action.kind is ActionKind.forward) - (span.action.kind is last)
                peak = max(peak, alive)
            peaks.append(peak)
        return tuple(peaks)


def simulate(schedule: Schedule, *, costs: Costs = UNIT_COSTS) -> Timeline:
    """Play a schedule through.

    Args:
        schedule: of all ranks; with forward passes only, or with backward passes as well.
        costs: time per stage and microbatch.

    Raises:
        ScheduleError: a pass that is missing, doubled, on the wrong rank or waited for in vain.

    >>> from nanotrain.parallel.pp.actions import PipelineShape
    >>> from nanotrain.parallel.pp.one_f_one_b import one_f_one_b
    >>> simulate(one_f_one_b(PipelineShape(4, 1, 8))).bubble_fraction == 3 / 11
    True
    """
    homes = _check_complete(schedule)
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    ends: dict[Action, float] = {}

    def ready_at(action: Action, rank: int) -> float | None:
        """When everything that an action needs is on its rank; None while something is still to be done."""
        needed = needed_by(action, num_stages=schedule.num_stages)
        if any(other not in ends for other in needed):
            return None
        return max((ends[o] + (costs.transfer if homes[o.stage] != rank else 0) for o in needed), default=0)

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            for action in actions[len(spans[rank]) :]:
                if (ready := ready_at(action, rank)) is None:
                    break
                start = max(ready, spans[rank][-1].end if spans[rank] else 0)
                ends[action] = start + costs.of(action.kind, is_split=schedule.has_weight_actions)
                spans[rank].append(Span(action, start, ends[action]))
                moved = True
    _check_finished(schedule, [len(done) for done in spans])
    return Timeline(tuple(map(tuple, spans)))


def needed_by(action: Action, *, num_stages: int) -> tuple[Action, ...]:
    """What has to be done before an action can run, beside the actions before it on its rank.

    >>> [str(other) for other in needed_by(backward(1, 7), num_stages=4)]
    ['F1.7', 'B2.7']
    """
    stage, microbatch = action.stage, action.microbatch
    if action.kind is ActionKind.forward:
        return (forward(stage - 1, microbatch),) if stage > 0 else ()
    if action.kind is ActionKind.weight:
        return (backward(stage, microbatch),)
    after = (backward(stage + 1, microbatch),) if stage < num_stages - 1 else ()
    return (forward(stage, microbatch), *after)


def _check_complete(schedule: Schedule) -> dict[int, int]:
    """Every kind of pass that occurs must occur once for every stage and microbatch; returns each stage's rank."""
    homes = {action.stage: rank for rank, actions in enumerate(schedule.actions) for action in actions}
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if homes[action.stage] != rank:
                raise ScheduleError(
                    f"{action} is on rank {rank}, other passes of its stage are on rank {homes[action.stage]}",
                    why="a stage lives on one rank",
                )
    counts, kinds = Counter(schedule), {action.kind for action in schedule} | {ActionKind.forward}
    num_microbatches = 1 + max((action.microbatch for action in schedule), default=-1)
    for stage in range(schedule.num_stages):
        for microbatch in range(num_microbatches):
            for kind in ActionKind:
                count, action = counts[Action(kind, stage, microbatch)], Action(kind, stage, microbatch)
                if count != (kind in kinds):
                    raise ScheduleError(
                        f"the schedule takes {action} {count} times",
                        why=f"every stage (0 to {schedule.num_stages - 1}) passes every microbatch "
                        f"(0 to {num_microbatches - 1}) once",
                    )
    return homes


def _check_finished(schedule: Schedule, done: list[int]) -> None:
    stuck = [
        f"rank {rank} at {actions[count]}"
        for rank, (actions, count) in enumerate(zip(schedule.actions, done, strict=True))
        if count < len(actions)
    ]
    if stuck:
        raise ScheduleError(
            f"the schedule never ends: {', '.join(stuck)} wait for each other",
            why="each needs something that comes later in the order of another",
        )
