"""The executor runs the actions of a plan in order and notifies callbacks."""

import torch
from torch import nn

from nanotrain.comm.group import Group
from nanotrain.comm.send_recv import Message, SendRecv
from nanotrain.comm.work import Work
from nanotrain.data.batch import Batch
from nanotrain.kernels.deferred_wgrad import Wgrad, WgradQueue
from nanotrain.parallel.pp import executor
from nanotrain.parallel.pp.actions import Action, ActionKind, PipelineShape, Schedule
from nanotrain.parallel.pp.executor import Pipeline, RunnableStage, run_schedule
from nanotrain.parallel.pp.schedules import gpipe, one_f_one_b
from nanotrain.parallel.pp.transfers import plan_rank
from tests.parallel.pp.toys import ToyStage, batches

events: list[str] = []


def batch(value: int) -> Batch:
    tokens = torch.full((1, 2), value)
    return Batch(tokens, tokens, torch.ones(1, 2))


class Doubling(nn.Module):
    """Its loss is weight x the sum of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))
        self.weight.register_hook(lambda grad: events.append("grad"))

    def forward(self, hidden: None, batch: Batch) -> torch.Tensor:
        assert hidden is None
        events.append(f"forward {int(batch.tokens[0, 0])}")
        return self.weight * batch.tokens.sum()


class Callback:
    def backward_begins(self, *, is_last: bool) -> None:
        events.append("begins, the last" if is_last else "begins")

    def backward_ended(self) -> None:
        events.append("ended")


def run(schedule: Schedule, *values: int, callbacks: int = 1, grad_scale: float = 1.0):
    events.clear()
    module = Doubling()
    stage = RunnableStage(module, tuple(Callback() for _ in range(callbacks)))
    microbatches = [batch(value) for value in values]
    loss = run_schedule(
        plan_rank(schedule, 0),
        {0: stage},
        microbatches=microbatches,
        grad_scale=grad_scale,
        pipeline=Pipeline.single_rank(),
    )
    return loss, module


def test_the_loss_is_the_sum_over_microbatches_and_is_not_scaled():
    loss, module = run(one_f_one_b(PipelineShape(1, 1, 3)), 1, 2, 5, grad_scale=0.25)
    assert loss.item() == 3.0 * 2 * (1 + 2 + 5)
    assert not loss.requires_grad and loss.dtype is torch.float32
    assert module.weight.grad.item() == 0.25 * 2 * (1 + 2 + 5)


def test_callbacks_are_notified_of_every_backward_and_which_is_the_last():
    run(one_f_one_b(PipelineShape(1, 1, 2)), 1, 2)
    assert events == [
        *("forward 1", "begins", "grad", "ended"),
        *("forward 2", "begins, the last", "grad", "ended"),
    ]


def test_actions_run_in_the_order_of_the_schedule():
    # Given a schedule of its own, all forwards first and backwards in reverse,
    kinds = [(ActionKind.forward, m) for m in (0, 1)] + [
        (ActionKind.full_backward, m) for m in (1, 0)
    ]
    schedule = Schedule((tuple(Action(kind, 0, m) for kind, m in kinds),))
    loss, _ = run(schedule, 1, 2)
    assert events == [
        "forward 1",
        "forward 2",
        "begins",
        "grad",
        "ended",
        "begins, the last",
        "grad",
        "ended",
    ]
    assert loss.item() == 18.0


def test_a_stage_may_have_several_callbacks_or_none():
    run(one_f_one_b(PipelineShape(1, 1, 1)), 1, callbacks=2)
    assert events == ["forward 1", "begins, the last", "begins, the last", "grad", "ended", "ended"]
    run(one_f_one_b(PipelineShape(1, 1, 1)), 1, callbacks=0)
    assert events == ["forward 1", "grad"]


class Turned(nn.Module):
    """Its output [1, 2, 3] is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 3, 2))

    def forward(self, hidden: None, batch: Batch) -> torch.Tensor:
        return (self.weight * batch.tokens).transpose(1, 2)


def test_sends_are_contiguous_and_the_oldest_is_waited_for_first(monkeypatch):
    started, waited = [], []

    def start(sends: list[Message], receives: list[Message], *, group: Group) -> SendRecv:
        assert all(message.tensor.is_contiguous() for message in sends)
        started.extend(sends)
        number = len(started)
        sent = Work(lambda: waited.append(number))
        return SendRecv(sent, tuple(Work.completed(torch.ones(1, 2, 3)) for _ in receives))

    # Given the first of two ranks, which sends four outputs,
    monkeypatch.setattr(executor, "start_send_recv", start)
    pipeline = Pipeline(Group.single_rank("pp"), (1, 2, 3), torch.float32, torch.device("cpu"))
    plan = plan_rank(gpipe(PipelineShape(2, 1, 4)), 0)
    run_schedule(
        plan,
        {0: RunnableStage(Turned())},
        microbatches=[batch(1)] * 4,
        grad_scale=1.0,
        pipeline=pipeline,
    )
    assert waited == [1, 2, 3, 4]


def test_i_leaves_the_weight_gradients_of_layers_that_can_defer_to_w():
    put = []

    class Recording(WgradQueue):
        def put(self, wgrad: Wgrad) -> None:
            put.append(stage.weight.grad)
            super().put(wgrad)

    stage, i, w = (
        ToyStage(0, 1, queue=Recording()),
        ActionKind.backward_input,
        ActionKind.backward_weight,
    )
    schedule = Schedule((tuple(Action(kind, 0, 0) for kind in (ActionKind.forward, i, w)),))
    stages = {0: RunnableStage(stage, wgrad_queue=stage.queue)}
    arguments = {"microbatches": batches(1), "grad_scale": 1.0, "pipeline": Pipeline.single_rank()}
    run_schedule(plan_rank(schedule, 0), stages, **arguments)
    assert put == [None] and stage.weight.grad is not None


def test_all_ranks_of_a_pipeline_take_part_in_its_first_collective(monkeypatch):
    joined: list[Group] = []
    monkeypatch.setattr(executor, "barrier", joined.append)
    pipeline = Pipeline.single_rank()
    pipeline.connect()
    assert joined == [pipeline.group]


def test_the_heartbeat_has_the_running_action():
    module, pipeline, seen = Doubling(), Pipeline.single_rank(), []
    heartbeat = pipeline.group.heartbeat
    heartbeat.begin("step", step=1)
    module.register_forward_pre_hook(lambda *_: seen.append(heartbeat.read().action))
    module.weight.register_hook(lambda _: seen.append(heartbeat.read().action))
    plan = plan_rank(one_f_one_b(PipelineShape(1, 1, 2)), 0)
    run_schedule(
        plan,
        {0: RunnableStage(module)},
        microbatches=[batch(1)] * 2,
        grad_scale=1.0,
        pipeline=pipeline,
    )
    assert seen == ["F0.0", "B0.0", "F0.1", "B0.1"]
