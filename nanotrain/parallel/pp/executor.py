"""The pipeline executor: runs the actions of this rank and transfers hidden states and gradients.

    Pipeline                the pp group and the shape of the transferred tensors
    RunnableStage           a stage, its backward callbacks and its wgrad queue
    run_schedule            a training step
    run_forward             forwards only
    _Step                   the state of a running step

Only the schedule determines which backward of a stage is the last of a step. The executor passes
this on to the callbacks (the data-parallel layer), which may reduce the gradients of that stage
from then on.

    B batch   S local sequence length   H hidden
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from nanotrain.comm.collectives import barrier
from nanotrain.comm.group import Group
from nanotrain.comm.send_recv import Message, start_send_recv
from nanotrain.comm.stop_point import StopPoint
from nanotrain.comm.turns import Turns
from nanotrain.comm.work import Work
from nanotrain.kernels.deferred_wgrad import Wgrad, WgradQueue, accumulate_wgrads
from nanotrain.parallel.pp.actions import Action, ActionKind
from nanotrain.parallel.pp.transfers import RankPlan, TransferBatch

# Sends in flight. The memory of a completed send is released when a later one starts.
MAX_SENDS = 2

ReadyGrad = tuple[nn.Parameter, Tensor]


class BackwardCallback(Protocol):
    """Notified before and after weight gradients are accumulated."""

    def backward_begins(self, *, is_last: bool) -> None:
        """Called before the weight gradients of a microbatch; `is_last`: the last of the step."""

    def backward_ended(self) -> None:
        """Called after the gradients of a backward are accumulated."""


@dataclass(frozen=True)
class RunnableStage:
    """A stage of this rank.

    The module takes the hidden states [B, S, H] of the previous stage (None on the first) and a
    microbatch. It returns hidden states of the same shape, on the last stage the summed loss, a
    scalar.
    """

    module: nn.Module
    callbacks: tuple[BackwardCallback, ...] = ()  # notified of its backwards
    # queue of its linear layers; without it a backward for the input computes weight gradients as
    # well
    wgrad_queue: WgradQueue | None = None
    # elements per hidden state of the messages that it receives and sends; None for hidden states
    # alone
    message_widths: tuple[int, int] | None = None

    @cached_property
    def trained_params(self) -> list[nn.Parameter]:
        """The parameters whose gradients an I action computes.

        Read first after the data-parallel layer has replaced them by views of its buffer.
        """
        return [param for param in self.module.parameters() if param.requires_grad]

    def message_shape(self, hidden_shape: tuple[int, ...], *, is_forward: bool) -> tuple[int, ...]:
        """The shape of a message that the stage receives in the forward, or else sends in it.

        A message that has more than hidden states is flat (model/shared_state.py). Gradients have
        the shape of the message that they are gradients of.
        """
        if self.message_widths is None:
            return hidden_shape
        received, sent = self.message_widths
        width = received if is_forward else sent
        *outer, hidden_size = hidden_shape
        return hidden_shape if width == hidden_size else (prod(outer) * width,)


@dataclass(frozen=True)
class Pipeline:
    """The pp group and the shape of the transferred tensors."""

    group: Group  # the pipeline ranks
    hidden_shape: tuple[int, ...]  # (B, S, H) of the hidden states between stages, as on this rank
    dtype: torch.dtype  # dtype of the hidden states and their gradients
    device: torch.device  # device of both
    turns: Turns = field(default_factory=Turns)  # taken by the actions of a pair
    stop_point: StopPoint | None = None  # stops a running step after a signal; None: never

    @classmethod
    def single_rank(cls, device: torch.device | str = "cpu") -> "Pipeline":
        """All stages are on this rank."""
        return cls(Group.single_rank("pp"), (), torch.float32, torch.device(device))

    def connect(self) -> None:
        """Create the communicator of the group before the first step; called by all its ranks."""
        # NCCL creates it in the first call on a group, which hangs unless all ranks of the group
        # take part. The first send or receive involves two ranks only.
        barrier(self.group)


def run_schedule(
    plan: RankPlan,
    stages: Mapping[int, RunnableStage],
    *,
    microbatches: Sequence[Any],
    grad_scale: float | Tensor,
    pipeline: Pipeline,
) -> Tensor:
    """Run the forwards and backwards of one step.

    Args:
        plan: plan of this rank.
        stages: stages of this rank, by global index.
        microbatches: microbatches on the device, passed to the stages as they are.
        grad_scale: factor of the summed loss that is differentiated; a scalar on the device if it
            is a tensor.
        pipeline: pp group and shape of the transferred tensors.

    Returns:
        The summed loss of all microbatches, detached and not scaled: an fp32 scalar on the device.
        Zero on ranks without the last stage.

    Raises:
        PassStopped: a rank received a signal; all ranks stopped before the same microbatch.
    """
    return _Step(plan, stages, microbatches, pipeline, grad_scale).run()


@torch.no_grad()
def run_forward(
    plan: RankPlan,
    stages: Mapping[int, RunnableStage],
    *,
    microbatches: Sequence[Any],
    pipeline: Pipeline,
) -> Tensor:
    """Run a forward-only plan and sum the losses; arguments and result as for `run_schedule`."""
    return _Step(plan, stages, microbatches, pipeline).run()


class InFlight(NamedTuple):
    """A microbatch between its forward and its backward on a stage."""

    hidden: Tensor | None  # input; None on the first stage with parameters that are trained
    output: GradientEdge  # graph of the output, whose values are not needed once they are sent


class WeightGrads(NamedTuple):
    """Weight gradients between I and W."""

    deferred: list[Wgrad]  # products that W computes
    ready: list[ReadyGrad]  # gradients that W only accumulates


@dataclass
class _Step:
    """The arguments and the state of a running step."""

    plan: RankPlan
    stages: Mapping[int, RunnableStage]
    microbatches: Sequence[Any]
    pipeline: Pipeline
    grad_scale: float | Tensor = 1.0
    # inputs of actions: received, being received, or results of this rank
    inbox: dict[Action, Work[Tensor]] = field(default_factory=dict)
    # results to be sent, by the action that takes them
    outbox: dict[Action, Tensor] = field(default_factory=dict)
    # inputs and outputs by (stage, microbatch)
    in_flight: dict[tuple[int, int], InFlight] = field(default_factory=dict)
    weight_grads: dict[tuple[int, int], WeightGrads] = field(default_factory=dict)
    sending: list[Work[None]] = field(default_factory=list)  # sends in flight, oldest first

    def run(self) -> Tensor:
        """Execute the plan; returns the sum of the losses of this rank's microbatches."""
        num_planned = self.plan.num_microbatches
        assert len(self.microbatches) == num_planned, f"the plan is for {num_planned} microbatches"
        self.total = torch.zeros((), device=self.pipeline.device)
        stop_point = self.pipeline.stop_point
        if stop_point is not None:
            stop_point.begin_pass()
        for step in self.plan.steps:
            if isinstance(step, TransferBatch):
                self.start_transfers(step)
            elif isinstance(step, Action):
                if self.may_begin(step):
                    self.begin(step)
            else:
                begun = [partial(self.begin, action) for action in step if self.may_begin(action)]
                self.pipeline.turns.run(begun)
        for work in self.sending:
            work.wait()
        if stop_point is not None:
            stop_point.end_pass(num_planned)
        return self.total

    def begin(self, action: Action) -> None:
        """Run one action."""
        self.pipeline.group.heartbeat.action(
            action.kind.value, stage=action.stage, microbatch=action.microbatch
        )
        getattr(self, action.kind.name)(action)  # the method is named as the kind

    def may_begin(self, action: Action) -> bool:
        """Whether to run an action; False if the ranks agreed to stop before its microbatch."""
        stop_point = self.pipeline.stop_point
        return stop_point is None or stop_point.may_begin(action.microbatch)

    def start_transfers(self, batch: TransferBatch) -> None:
        """Start the sends and receives of a batch, without microbatches that no rank begins."""
        sends: list[Message] = []
        receives: list[Message] = []
        receivers: list[Action] = []
        for send in batch.sends:
            if self.may_begin(send.to):
                sends.append(Message(self.outbox.pop(send.to).contiguous(), send.peer))
        for receive in batch.receives:
            if self.may_begin(receive.to):
                receives.append(Message(self.empty_message(receive.to), receive.peer))
                receivers.append(receive.to)
        if not sends and not receives:
            return
        while sends and len(self.sending) >= MAX_SENDS:
            self.sending.pop(0).wait()
        started = start_send_recv(sends, receives, group=self.pipeline.group)
        if sends:
            self.sending.append(started.sent)
        for action, work in zip(receivers, started.received, strict=True):
            self.inbox[action] = work

    def empty_message(self, action: Action) -> Tensor:
        """Memory for the input of a forward, or for the gradient of a stage's output."""
        pipeline = self.pipeline
        shape = self.stages[action.stage].message_shape(
            pipeline.hidden_shape, is_forward=action.kind is ActionKind.forward
        )
        return torch.empty(shape, dtype=pipeline.dtype, device=pipeline.device)

    def forward(self, action: Action) -> None:
        """F: run the stage and keep its graph."""
        hidden = self.inbox.pop(action).wait() if action.stage > 0 else None
        needs_grad = torch.is_grad_enabled() and action.stage > self.plan.first_trained_stage
        if hidden is not None and needs_grad:
            hidden.requires_grad_()
        output = self.stages[action.stage].module(hidden, self.microbatches[action.microbatch])
        if output.requires_grad:
            in_flight = InFlight(hidden if needs_grad else None, get_gradient_edge(output))
            self.in_flight[action.stage, action.microbatch] = in_flight
        if action.stage == self.plan.num_stages - 1:
            self.total = self.total + output.detach()  # fp64 where losses are
        self.pass_on(action, output.detach())

    def full_backward(self, action: Action) -> None:
        """B: compute and accumulate all gradients of a microbatch."""
        hidden, output = self.in_flight.pop((action.stage, action.microbatch))
        grad = self.grad_of_output(action)
        with self.accumulating(action):
            torch.autograd.backward(output, grad)
        if hidden is not None:
            self.pass_on(action, hidden.grad)

    def backward_input(self, action: Action) -> None:
        """I: compute the gradient of the stage's input and keep the weight gradients for W."""
        hidden, output = self.in_flight.pop((action.stage, action.microbatch))
        stage = self.stages[action.stage]
        params = stage.trained_params
        queue = stage.wgrad_queue or WgradQueue()
        inputs = [*params] if hidden is None else [hidden, *params]
        output_grad = self.grad_of_output(action)
        # Gradients that no layer defers (norms, embedding, head, router) are computed here and
        # accumulated by W.
        with queue.defer():
            grads = [*torch.autograd.grad(output, inputs, output_grad, allow_unused=True)]
        if hidden is not None:
            self.pass_on(action, grads.pop(0))
        ready = []
        for param, grad in zip(params, grads, strict=True):
            if grad is not None:
                ready.append((param, grad))
        self.weight_grads[action.stage, action.microbatch] = WeightGrads(queue.take(), ready)

    def backward_weight(self, action: Action) -> None:
        """W: compute the deferred weight gradients of a microbatch and accumulate all of them."""
        deferred, ready = self.weight_grads.pop((action.stage, action.microbatch))
        with self.accumulating(action):
            accumulate_wgrads(deferred, ready=ready)

    @contextmanager
    def accumulating(self, action: Action) -> Iterator[None]:
        """Notify the callbacks of a stage before and after weight gradients are accumulated."""
        callbacks = self.stages[action.stage].callbacks
        is_last = action in self.plan.last_backwards
        for callback in callbacks:
            callback.backward_begins(is_last=is_last)
        yield
        for callback in callbacks:
            callback.backward_ended()

    def grad_of_output(self, action: Action) -> Tensor:
        """The gradient of the stage's output: the loss scale on the last stage, else received."""
        if action.stage < self.plan.num_stages - 1:
            return self.inbox.pop(action).wait()
        if isinstance(self.grad_scale, Tensor):
            return self.grad_scale.float()
        return torch.full((), self.grad_scale, device=self.pipeline.device)

    def pass_on(self, action: Action, result: Tensor | None) -> None:
        """Store the result of an action for its consumer, in the inbox or in the outbox."""
        to = self.plan.consumers.get(action)
        if to is None:
            return
        assert result is not None, (
            f"{action} has no result for {to}: its output does not depend on its input"
        )
        if to.stage in self.stages:
            self.inbox[to] = Work.completed(result)
        else:
            self.outbox[to] = result
