"""Carries a schedule out: runs each action of this rank on the stage and microbatch it names.

The executor knows the schedule, so it alone knows which backward of a stage is the last of the step; it tells the
stage, and whoever listens there (the data-parallel layer) may reduce that stage's gradients from then on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from nanotrain.data.batch import Batch
from nanotrain.parallel.pp.actions import ActionKind, Schedule


class BackwardListener(Protocol):
    """Who wants to know when gradients arrive."""

    def backward_begins(self, *, is_last: bool) -> None:
        """A backward pass of the stage begins; `is_last` if no other follows in this step."""

    def backward_ended(self) -> None:
        """It is over."""


@dataclass(frozen=True)
class RunnableStage:
    """A stage and who listens to its backward passes.

    Attributes:
        module: called with the hidden states of the stage before (None on the first) and the microbatch.
        listeners: told of every backward pass.
    """

    module: nn.Module
    listeners: tuple[BackwardListener, ...]


def run_schedule(
    schedule: Schedule, stages: Mapping[int, RunnableStage], *, microbatches: Sequence[Batch], grad_scale: float
) -> torch.Tensor:
    """Run one step's forward and backward passes.

    Args:
        schedule: the plan of a pipeline of one rank.
        stages: the stages of this rank by global index.
        microbatches: those of this rank, on its device.
        grad_scale: what the summed loss is multiplied by before it is differentiated.

    Returns:
        The summed loss of all microbatches, detached, an fp32 scalar on the device; not scaled.
    """
    last = schedule.last_backwards(0)
    losses: dict[int, torch.Tensor] = {}
    total = torch.zeros((), device=microbatches[0].tokens.device)
    for action in schedule.actions[0]:
        stage = stages[action.stage]
        if action.kind is ActionKind.forward:
            losses[action.microbatch] = stage.module(None, microbatches[action.microbatch])
            continue
        loss = losses.pop(action.microbatch)
        for listener in stage.listeners:
            listener.backward_begins(is_last=action in last)
        (loss * grad_scale).backward()
        for listener in stage.listeners:
            listener.backward_ended()
        total += loss.detach()
    return total
