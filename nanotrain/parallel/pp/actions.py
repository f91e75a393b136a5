"""A pipeline schedule as data: for each pipeline rank, the actions it takes in one step, in order.

    stage     0    1    2    3    4    5        2 stages on each of 3 ranks: stage s lives on rank s % 3,
    rank      0    1    2    0    1    2        so hidden states go around the ring of ranks

No pipeline is the schedule of one stage, so there is one train step for every topology.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class ActionKind(str, Enum):
    """What a rank does with one microbatch.

    A backward pass computes all gradients, except in a schedule that has weight actions: there it computes the
    gradients of the stage's input only, and the weight action those of the weights.
    """

    forward = "F"
    backward = "B"
    weight = "W"


@dataclass(frozen=True)
class Action:
    """One thing one rank does.

    Attributes:
        kind: forward, backward or weight.
        stage: global index of the stage.
        microbatch: number of the microbatch within the step.
    """

    kind: ActionKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"


def forward(stage: int, microbatch: int) -> Action:
    """A microbatch's forward pass through a stage."""
    return Action(ActionKind.forward, stage, microbatch)


def backward(stage: int, microbatch: int) -> Action:
    """A microbatch's backward pass through a stage, or its first half where weight actions follow."""
    return Action(ActionKind.backward, stage, microbatch)


def weight(stage: int, microbatch: int) -> Action:
    """The gradients of a stage's weights for one microbatch."""
    return Action(ActionKind.weight, stage, microbatch)


@dataclass(frozen=True)
class PipelineShape:
    """What a schedule is a function of.

    Attributes:
        num_ranks: pipeline ranks.
        num_stages_per_rank: stages on each of them.
        num_microbatches: microbatches of a step, at least 1.
    """

    num_ranks: int
    num_stages_per_rank: int
    num_microbatches: int

    @property
    def num_stages(self) -> int:
        """Stages on all ranks."""
        return self.num_ranks * self.num_stages_per_rank

    def stages_of(self, rank: int) -> range:
        """The stages that live on a rank.

        >>> list(PipelineShape(4, 2, 8).stages_of(1))
        [1, 5]
        """
        return range(rank, self.num_stages, self.num_ranks)


@dataclass(frozen=True)
class Schedule:
    """The actions of every pipeline rank.

    Attributes:
        actions: one tuple per pipeline rank.
    """

    actions: tuple[tuple[Action, ...], ...]

    def __iter__(self) -> Iterator[Action]:
        for of_rank in self.actions:
            yield from of_rank

    @cached_property
    def num_stages(self) -> int:
        """Stages that occur in it."""
        return 1 + max((action.stage for action in self), default=-1)

    @cached_property
    def has_weight_actions(self) -> bool:
        """Whether backward passes are split into input and weight gradients."""
        return any(action.kind is ActionKind.weight for action in self)

    def last_backwards(self, pp_rank: int) -> frozenset[Action]:
        """For each stage of a rank the action after which its gradients of the step are complete."""
        completing = ActionKind.weight if self.has_weight_actions else ActionKind.backward
        last = {action.stage: action for action in self.actions[pp_rank] if action.kind is completing}
        return frozenset(last.values())
