"""The executor runs the actions of a plan in order and notifies callbacks."""

import torch
from torch import nn

from nanotrain.data.batch import Batch
from nanotrain.parallel.pp.actions import Action, ActionKind, PipelineShape, Schedule
from nanotrain.parallel.pp.executor import Pipeline, RunnableStage, run_schedule
from nanotrain.parallel.pp.one_f_one_b import one_f_one_b
from nanotrain.parallel.pp.transfers import plan_rank

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
    kinds = [(ActionKind.forward, m) for m in (0, 1)] + [(ActionKind.full_backward, m) for m in (1, 0)]
    schedule = Schedule((tuple(Action(kind, 0, m) for kind, m in kinds),))
    loss, _ = run(schedule, 1, 2)
    assert events == ["forward 1", "forward 2", "begins", "grad", "ended", "begins, the last", "grad", "ended"]
    assert loss.item() == 18.0


def test_a_stage_may_have_several_callbacks_or_none():
    run(one_f_one_b(PipelineShape(1, 1, 1)), 1, callbacks=2)
    assert events == ["forward 1", "begins, the last", "begins, the last", "grad", "ended", "ended"]
    run(one_f_one_b(PipelineShape(1, 1, 1)), 1, callbacks=0)
    assert events == ["forward 1", "grad"]
