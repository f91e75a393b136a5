"""Carries a schedule out: runs each action of this rank on the stage and microbatch it names, and moves what flows.

    Pipeline                the group, and what its messages look like
    RunnableStage           a stage, who listens to its backward passes, and its deferred weight gradients
    run_schedule            a training step
    run_forward             forward passes alone
    _Step                   a step under way

The executor knows the schedule, so it alone knows which backward of a stage is the last of the step; it tells the
stage, and whoever listens there (the data-parallel layer) may reduce that stage's gradients from then on.

    B batch   S sequence as held by this rank   H hidden
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from nanotrain.comm.collectives import barrier
from nanotrain.comm.group import Group
from nanotrain.comm.send_recv import Message, start_send_recv
from nanotrain.comm.work import Work
from nanotrain.data.batch import Batch
from nanotrain.kernels.deferred_wgrad import Wgrad, WgradQueue, accumulate_wgrads
from nanotrain.parallel.pp.actions import Action, ActionKind, PipelineShape, Schedule
from nanotrain.parallel.pp.gpipe import forward_only
from nanotrain.parallel.pp.transfers import Exchange, RankPlan, consumer_of, plan_rank

# Sends that may be under way at once. A finished one gives its memory back when a later one is started.
MAX_SENDS = 2


class BackwardListener(Protocol):
    """Who wants to know when gradients arrive."""

    def backward_begins(self, *, is_last: bool) -> None:
        """Weight gradients of a microbatch are about to arrive; `is_last` if no others follow in this step."""

    def backward_ended(self) -> None:
        """They have arrived."""


@dataclass(frozen=True)
class RunnableStage:
    """A stage and what belongs to its backward passes.

    Attributes:
        module: called with the hidden states [B, S, H] of the stage before (None on the first) and the microbatch;
            gives hidden states of the same shape, or on the last stage the summed loss, a scalar.
        listeners: told whenever weight gradients are about to arrive, and when they have.
        wgrad_queue: of the layers that can defer their weight gradients; without it a split backward gains no time.
    """

    module: nn.Module
    listeners: tuple[BackwardListener, ...] = ()
    wgrad_queue: WgradQueue | None = None


@dataclass(frozen=True)
class Pipeline:
    """The group that stages talk over, and what they send.

    Attributes:
        group: the pipeline ranks.
        hidden_shape: (B, S, H) of the hidden states between stages.
        dtype: of the hidden states and their gradients.
        device: where they are.
    """

    group: Group
    hidden_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def single_rank(cls, device: torch.device | str = "cpu") -> "Pipeline":
        """No pipeline: all stages are on this rank and nothing is sent."""
        return cls(Group.single_rank("pp"), (), torch.float32, torch.device(device))

    def connect(self) -> None:
        """Bring all ranks of the group together once, before the first step."""
        # NCCL builds a communicator at the first call on a group, and that call hangs unless all members make it.
        barrier(self.group)


def run_schedule(
    schedule: Schedule,
    stages: Mapping[int, RunnableStage],
    *,
    microbatches: Sequence[Batch],
    grad_scale: float,
    pipeline: Pipeline,
) -> Tensor:
    """Run one step's forward and backward passes.

    Args:
        schedule: the plan of the whole pipeline.
        stages: the stages of this rank by global index.
        microbatches: those of this rank's pipeline, on the device; the same on all of its ranks.
        grad_scale: what the summed loss is multiplied by before it is differentiated.
        pipeline: whom to talk to.

    Returns:
        The summed loss of all microbatches, detached, an fp32 scalar on the device, not scaled; zero on a rank without
        the last stage.
    """
    plan = plan_rank(schedule, pipeline.group.index)
    return _Step(plan, stages, microbatches=microbatches, grad_scale=grad_scale, pipeline=pipeline).run()


@torch.no_grad()
def run_forward(stages: Mapping[int, RunnableStage], *, microbatches: Sequence[Batch], pipeline: Pipeline) -> Tensor:
    """Run forward passes alone and sum their losses; arguments and result as for `run_schedule`."""
    shape = PipelineShape(pipeline.group.size, len(stages), len(microbatches))
    plan = plan_rank(forward_only(shape), pipeline.group.index)
    return _Step(plan, stages, microbatches=microbatches, grad_scale=1.0, pipeline=pipeline).run()


@dataclass(frozen=True)
class _Live:
    """A microbatch between its forward and its backward pass through a stage.

    Only the graph of the output is kept: once sent, its values are needed by nobody.
    """

    hidden: Tensor | None
    output: GradientEdge


@dataclass(frozen=True)
class _WeightGrads:
    """Weight gradients of one microbatch: still to be computed, or computed and not yet accumulated."""

    deferred: list[Wgrad]
    ready: list[tuple[nn.Parameter, Tensor]]


class _Step:
    """One step under way on one rank.

    Attributes:
        inbox: what arrived, or is on its way, by the action that it is for.
        outbox: what actions of this rank have made for other ranks.
        live: microbatches whose backward pass is still to come, by (stage, microbatch).
        weight_grads: microbatches whose weight gradients are still to come.
        sending: sends under way, oldest first.
    """

    def __init__(
        self,
        plan: RankPlan,
        stages: Mapping[int, RunnableStage],
        *,
        microbatches: Sequence[Batch],
        grad_scale: float,
        pipeline: Pipeline,
    ) -> None:
        self.plan, self.stages, self.microbatches, self.pipeline = plan, stages, microbatches, pipeline
        self.grad_scale = grad_scale
        self.total = torch.zeros((), device=pipeline.device)
        self.inbox: dict[Action, Work[Tensor]] = {}
        self.outbox: dict[Action, Tensor] = {}
        self.live: dict[tuple[int, int], _Live] = {}
        self.weight_grads: dict[tuple[int, int], _WeightGrads] = {}
        self.sending: list[Work[None]] = []

    def run(self) -> Tensor:
        act = {ActionKind.forward: self.forward, ActionKind.weight: self.weight}
        act[ActionKind.backward] = self.backward_of_input if self.plan.is_split else self.backward
        for step in self.plan.steps:
            if isinstance(step, Exchange):
                self.exchange(step)
            else:
                act[step.kind](step)
        for work in self.sending:
            work.wait()
        return self.total

    def exchange(self, exchange: Exchange) -> None:
        """Start the transfers of an exchange."""
        pipeline = self.pipeline
        sends = [Message(self.outbox.pop(send.to).contiguous(), send.peer) for send in exchange.sends]
        buffers = [
            torch.empty(pipeline.hidden_shape, dtype=pipeline.dtype, device=pipeline.device) for _ in exchange.receives
        ]
        receives = [Message(b, receive.peer) for b, receive in zip(buffers, exchange.receives, strict=True)]
        while sends and len(self.sending) >= MAX_SENDS:
            self.sending.pop(0).wait()
        started = start_send_recv(sends, receives, group=pipeline.group)
        if sends:
            self.sending.append(started.sent)
        for receive, work in zip(exchange.receives, started.received, strict=True):
            self.inbox[receive.to] = work

    def forward(self, action: Action) -> None:
        """Run a stage forward and keep its graph."""
        hidden = self.received(action) if action.stage > 0 else None
        if hidden is not None and torch.is_grad_enabled():
            hidden.requires_grad_()
        output = self.stages[action.stage].module(hidden, self.microbatches[action.microbatch])
        if output.requires_grad:
            self.live[action.stage, action.microbatch] = _Live(hidden, get_gradient_edge(output))
        if action.stage == self.plan.num_stages - 1:
            self.total += output.detach()
        self.hand_on(action, output.detach())

    def backward(self, action: Action) -> None:
        """Compute all gradients of a microbatch."""
        live, stage = self.live.pop((action.stage, action.microbatch)), self.stages[action.stage]
        grad = self.grad_of_output(action)
        for listener in stage.listeners:
            listener.backward_begins(is_last=action in self.plan.last_backwards)
        torch.autograd.backward(live.output, grad)
        for listener in stage.listeners:
            listener.backward_ended()
        if live.hidden is not None:
            self.hand_on(action, live.hidden.grad)

    def backward_of_input(self, action: Action) -> None:
        """Compute the gradient of a stage's input; those of its weights stay aside until their action."""
        live, stage = self.live.pop((action.stage, action.microbatch)), self.stages[action.stage]
        params = [param for param in stage.module.parameters() if param.requires_grad]
        wanted = [*params] if live.hidden is None else [live.hidden, *params]
        queue = stage.wgrad_queue or WgradQueue()
        # Gradients that no layer defers (norms, embeddings, router) are computed here and accumulated by W.
        with queue.defer():
            grads = list(torch.autograd.grad(live.output, wanted, self.grad_of_output(action), allow_unused=True))
        if live.hidden is not None:
            self.hand_on(action, grads.pop(0))
        ready = [(param, grad) for param, grad in zip(params, grads, strict=True) if grad is not None]
        self.weight_grads[action.stage, action.microbatch] = _WeightGrads(queue.take(), ready)

    def weight(self, action: Action) -> None:
        """Compute and hand out the weight gradients of a microbatch."""
        stage, grads = self.stages[action.stage], self.weight_grads.pop((action.stage, action.microbatch))
        for listener in stage.listeners:
            listener.backward_begins(is_last=action in self.plan.last_backwards)
        accumulate_wgrads(grads.deferred, ready=grads.ready)
        for listener in stage.listeners:
            listener.backward_ended()

    def received(self, action: Action) -> Tensor:
        """What was sent to an action, waited for."""
        return self.inbox.pop(action).wait()

    def grad_of_output(self, action: Action) -> Tensor:
        """The gradient that a backward pass begins with."""
        if action.stage == self.plan.num_stages - 1:
            return torch.full((), self.grad_scale, device=self.pipeline.device)
        return self.received(action)

    def hand_on(self, action: Action, made: Tensor | None) -> None:
        """Lay what an action made where the action that takes it finds it: on this rank, or ready to be sent."""
        to = consumer_of(action, num_stages=self.plan.num_stages)
        if to is None:
            return
        assert made is not None, f"{action} made nothing for {to}: its output does not depend on its input"
        if to.stage in self.stages:
            self.inbox[to] = Work.completed(made)
        else:
            self.outbox[to] = made
