"""A pipeline schedule as data: the actions of every pipeline rank in one step, in order.

    F   forward                                 as in torch.distributed.pipelining;
    B   full backward                           a microbatch has either one B per stage,
    I   backward for the input                  or one I and one W
    W   backward for the weights

    stage     0    1    2    3    4    5        2 stages per rank, 3 ranks: stage s is on s % 3,
    rank      0    1    2    0    1    2        so hidden states are sent around a ring
    rank      0    1    2    2    1    0        or in a V: there and back (`v_schedules.py`)

A step without a pipeline is the schedule of one stage, so there is one train step for every
topology.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from itertools import chain
from typing import NamedTuple, Self

from nanotrain.config.parallel import ParallelConfig


class ActionKind(str, Enum):
    """The computation of an action, for one stage and microbatch."""

    forward = "F"
    full_backward = "B"
    backward_input = "I"
    backward_weight = "W"

    __hash__ = str.__hash__  # Enum's is written in Python

    @property
    def has_dgrad(self) -> bool:
        """Whether it computes the gradient of the stage's input."""
        return self in (ActionKind.full_backward, ActionKind.backward_input)

    @property
    def has_wgrad(self) -> bool:
        """Whether it completes the weight gradients of the microbatch."""
        return self in (ActionKind.full_backward, ActionKind.backward_weight)


class Action(NamedTuple):
    """One computation of one rank; a tuple, as planning hashes hundreds of thousands of them."""

    kind: ActionKind  # F, B, I or W
    stage: int  # global index of the stage
    microbatch: int  # index of the microbatch within the step

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"


class Pair(NamedTuple):
    """A forward and a full backward that a rank runs in turns; neither needs the other's result."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"{self.forward}, {self.backward}"


# The action of a stage and a microbatch, by kind.
forward = partial(Action, ActionKind.forward)
full_backward = partial(Action, ActionKind.full_backward)
backward_input = partial(Action, ActionKind.backward_input)
backward_weight = partial(Action, ActionKind.backward_weight)


@dataclass(frozen=True)
class PipelineShape:
    """The arguments of a schedule."""

    num_ranks: int  # pipeline ranks
    num_stages_per_rank: int  # stages on each of them
    num_microbatches: int  # microbatches per step, at least 1
    has_pairs: bool = False  # whether forwards run in turns with backwards of other microbatches

    @classmethod
    def of(cls, parallel: ParallelConfig, num_microbatches: int) -> Self:
        """The arguments of the configured pipeline."""
        return cls(
            num_ranks=parallel.pipeline_model_parallel_size,
            num_stages_per_rank=parallel.num_virtual_stages_per_pipeline_rank,
            num_microbatches=num_microbatches,
            has_pairs=bool(parallel.overlap_moe_expert_parallel_comm),
        )

    @property
    def num_stages(self) -> int:
        """Stages on all ranks."""
        return self.num_ranks * self.num_stages_per_rank

    def stages_of(self, rank: int) -> range:
        """The stages on a rank of a ring.

        >>> list(PipelineShape(4, 2, 8).stages_of(1))
        [1, 5]
        """
        return range(rank, self.num_stages, self.num_ranks)


@dataclass(frozen=True)
class Schedule:
    """The actions of every pipeline rank."""

    actions: tuple[tuple[Action, ...], ...]  # one tuple per pipeline rank
    pairs: frozenset[Pair] = frozenset()  # actions that follow each other on a rank

    def __iter__(self) -> Iterator[Action]:
        return chain.from_iterable(self.actions)

    def steps(self, pp_rank: int) -> Iterator[Action | Pair]:
        """The actions and pairs of a rank, in order."""
        paired_forwards = {pair.forward for pair in self.pairs}
        actions = iter(self.actions[pp_rank])
        for action in actions:
            if action in paired_forwards:
                yield Pair(action, next(actions))
            else:
                yield action

    def freeing_first(self, pp_rank: int) -> Iterator[Action]:
        """The actions of a rank; the backward of a pair comes before its forward.

        A layer of the backward is freed before a layer of the forward is kept.
        """
        for step in self.steps(pp_rank):
            if isinstance(step, Pair):
                yield step.backward
                yield step.forward
            else:
                yield step

    @cached_property
    def num_stages(self) -> int:
        """Number of stages."""
        return 1 + max((action.stage for action in self), default=-1)

    @cached_property
    def num_microbatches(self) -> int:
        """Number of microbatches."""
        return 1 + max((action.microbatch for action in self), default=-1)

    @cached_property
    def rank_of_stage(self) -> dict[int, int]:
        """The pipeline rank of each stage."""
        return {
            action.stage: rank for rank, actions in enumerate(self.actions) for action in actions
        }

    @cached_property
    def _dgrads(self) -> dict[tuple[int, int], Action]:
        """The action that computes the input gradient, by stage and microbatch."""
        return {
            (action.stage, action.microbatch): action for action in self if action.kind.has_dgrad
        }

    def dependencies_of(self, action: Action) -> tuple[Action, ...]:
        """The actions whose results `action` needs.

        >>> first = (forward(0, 0), full_backward(0, 0))
        >>> last = (forward(1, 0), full_backward(1, 0))
        >>> schedule = Schedule((first, last))
        >>> [str(other) for other in schedule.dependencies_of(full_backward(0, 0))]
        ['F0.0', 'B1.0']
        """
        kind, stage, microbatch = action
        if kind is ActionKind.backward_weight:
            return (backward_input(stage, microbatch),)
        if kind is ActionKind.forward:
            return (forward(stage - 1, microbatch),) if stage > 0 else ()
        own_forward = forward(stage, microbatch)
        if stage == self.num_stages - 1:
            return (own_forward,)
        return (own_forward, self._dgrads[stage + 1, microbatch])

    def consumer_of(self, action: Action) -> Action | None:
        """The action of another stage that reads the result of `action`, or None.

        The result is hidden states or their gradient.

        >>> first = (forward(0, 0), full_backward(0, 0))
        >>> last = (forward(1, 0), full_backward(1, 0))
        >>> schedule = Schedule((first, last))
        >>> [str(schedule.consumer_of(action)) for action in schedule]
        ['F1.0', 'None', 'None', 'B0.0']
        """
        if action.kind is ActionKind.forward and action.stage < self.num_stages - 1:
            return forward(action.stage + 1, action.microbatch)
        if action.kind.has_dgrad and action.stage > 0:
            return self._dgrads[action.stage - 1, action.microbatch]
        return None

    def last_backwards(self, pp_rank: int) -> frozenset[Action]:
        """For each stage of a rank, the action that completes the weight gradients of the step."""
        last: dict[int, Action] = {}
        for action in self.actions[pp_rank]:
            if action.kind.has_wgrad:
                last[action.stage] = action
        return frozenset(last.values())
