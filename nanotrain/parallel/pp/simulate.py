"""Simulation of a schedule without a device: whether it finishes, its duration and its memory.

Every rank runs its actions in order, each as soon as its dependencies are complete:

    F      after F of the previous stage
    B, I   after B or I of the next stage, and F of its own
    W      after I of its own stage
    pair   after the dependencies of both; both results are complete at its end

A deadlock and a missing or repeated action are errors here; at run time they would be a hang or a
wrong gradient.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from nanotrain.errors import ScheduleError
from nanotrain.parallel.pp.actions import Action, ActionKind, Schedule


@dataclass(frozen=True)
class Costs:
    """Time per stage and microbatch, in any unit."""

    forward: float = 1  # time of F
    backward: float = 2  # time of B; I takes `backward - weight`
    weight: float = 1  # time of W
    transfer: float = 0  # time of a transfer between ranks, overlapped with computation


UNIT_COSTS = Costs()


class Span(NamedTuple):
    """Start and end of an action."""

    action: Action
    start: float
    end: float
    complete: float  # when its result can be sent: at its end, or at the end of its pair


@dataclass(frozen=True)
class Timeline:
    """The result of `simulate`."""

    spans: tuple[tuple[Span, ...], ...]  # for each rank its actions with their times, in order

    @property
    def duration(self) -> float:
        """Time at which the last action of any rank ends."""
        return max((spans[-1].end for spans in self.spans if spans), default=0)

    @property
    def bubble_fraction(self) -> float:
        """Idle share of the time of all ranks, warmup and cooldown included."""
        busy = sum(span.end - span.start for spans in self.spans for span in spans)
        total = self.duration * len(self.spans)
        return (total - busy) / total if total else 0.0

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """For each rank the most (stage, microbatch) pairs between F and B or I (activations)."""
        return tuple(_peak(spans, lambda kind: kind.has_dgrad) for spans in self.spans)

    @property
    def peak_until_wgrad(self) -> tuple[int, ...]:
        """For each rank the most (stage, microbatch) pairs between F and B or W (wgrad inputs)."""
        return tuple(_peak(spans, lambda kind: kind.has_wgrad) for spans in self.spans)


def simulate(schedule: Schedule, *, costs: Costs = UNIT_COSTS) -> Timeline:
    """Run a schedule, with or without backward actions, on a simulated clock.

    Raises:
        ScheduleError: an action that is missing, repeated or on the wrong rank, or a deadlock.

    >>> from nanotrain.parallel.pp.actions import PipelineShape
    >>> from nanotrain.parallel.pp.schedules import one_f_one_b
    >>> simulate(one_f_one_b(PipelineShape(4, 1, 8))).bubble_fraction == 3 / 11
    True
    """
    _check_ranks(schedule)
    _check_complete(schedule)
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    completed: dict[Action, float] = {}
    cost_of = {
        ActionKind.forward: costs.forward,
        ActionKind.full_backward: costs.backward,
        ActionKind.backward_input: costs.backward - costs.weight,
        ActionKind.backward_weight: costs.weight,
    }

    for rank, actions, needed in runnable_steps(schedule):
        done = spans[rank]
        start = done[-1].end if done else 0.0
        for action in needed:
            is_sent = schedule.rank_of_stage[action.stage] != rank
            received = completed[action] + costs.transfer if is_sent else completed[action]
            start = max(start, received)
        complete = start + sum(cost_of[action.kind] for action in actions)
        for action in actions:
            end = start + cost_of[action.kind]
            done.append(Span(action, start, end, complete))
            completed[action] = complete
            start = end
    _check_finished(schedule, spans)
    return Timeline(tuple(map(tuple, spans)))


def runnable_steps(schedule: Schedule) -> Iterator[tuple[int, tuple[Action, ...], list[Action]]]:
    """Actions of all ranks in an order that they can run in; a deadlock ends it early.

    Yields:
        A rank, an action or the two of a pair, and the actions whose results it needs.
    """
    following = [deque(schedule.steps(rank)) for rank in range(len(schedule.actions))]
    done: set[Action] = set()
    num_before = -1
    while len(done) > num_before:
        num_before = len(done)
        for rank, steps in enumerate(following):
            while steps:
                actions = (steps[0],) if isinstance(steps[0], Action) else tuple(steps[0])
                needed: list[Action] = []
                for action in actions:
                    needed += schedule.dependencies_of(action)
                if not done.issuperset(needed):
                    break
                steps.popleft()
                done.update(actions)
                yield rank, actions, needed


def _peak(spans: Iterable[Span], is_end: Callable[[ActionKind], bool]) -> int:
    """The most microbatches in flight: after their forward, before the action that ends them."""
    in_flight = 0
    peak = 0
    for span in spans:
        if span.action.kind is ActionKind.forward:
            in_flight += 1
            peak = max(peak, in_flight)
        elif is_end(span.action.kind):
            in_flight -= 1
    return peak


def _check_ranks(schedule: Schedule) -> None:
    """Check that all actions of a stage are on one rank."""
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            other = schedule.rank_of_stage[action.stage]
            if other != rank:
                raise ScheduleError(
                    f"{action} is on rank {rank}, other actions of its stage are on rank {other}",
                    why="a stage is on one rank",
                )


def _check_complete(schedule: Schedule) -> None:
    """Raise unless each stage runs each microbatch with one F and, with backwards, B or I and W."""
    kinds: dict[tuple[int, int], str] = defaultdict(str)
    for kind, stage, microbatch in schedule:
        kinds[stage, microbatch] += kind.value
    has_backwards = any(action.kind is not ActionKind.forward for action in schedule)
    complete = {"BF", "FIW"} if has_backwards else {"F"}
    for stage, microbatch in product(range(schedule.num_stages), range(schedule.num_microbatches)):
        letters = kinds[stage, microbatch]
        if "".join(sorted(letters)) not in complete:
            actions = " ".join(letters) or "no action"
            raise ScheduleError(
                f"stage {stage} runs microbatch {microbatch} with {actions}",
                why=f"each of {schedule.num_stages} stages runs each of "
                f"{schedule.num_microbatches} microbatches with one F and, unless the schedule is "
                "forward only, one B or one I and one W",
            )


def _check_finished(schedule: Schedule, spans: list[list[Span]]) -> None:
    """Raise ScheduleError with the next action of each rank if any action did not run."""
    remaining = [
        actions[len(done) :] for actions, done in zip(schedule.actions, spans, strict=True)
    ]
    stuck = [f"rank {rank} at {actions[0]}" for rank, actions in enumerate(remaining) if actions]
    if stuck:
        raise ScheduleError(
            f"the schedule deadlocks: {', '.join(stuck)}",
            why="each waits for an action that comes later on another rank",
        )
