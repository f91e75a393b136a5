"""A pipeline schedule as data: for each pipeline rank, the actions it takes in one step, in order.

No pipeline is the schedule of one stage, so there is one train step for every topology.
"""

from dataclasses import dataclass
from enum import Enum


class ActionKind(str, Enum):
    """What a rank does with one microbatch."""

    forward = "F"
    backward = "B"


@dataclass(frozen=True)
class Action:
    """One thing one rank does.

    Attributes:
        kind: forward or backward.
        stage: global index of the stage.
        microbatch: number of the microbatch within the step.
    """

    kind: ActionKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """The actions of every pipeline rank.

    Attributes:
        actions: one tuple per pipeline rank.
    """

    actions: tuple[tuple[Action, ...], ...]

    def last_backwards(self, pp_rank: int) -> frozenset[Action]:
        """For each stage of a rank the backward after which no other of that stage follows."""
        last = {action.stage: action for action in self.actions[pp_rank] if action.kind is ActionKind.backward}
        return frozenset(last.values())
