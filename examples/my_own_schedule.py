"""Write a schedule of your own: a function from numbers to frozen data, drawn, checked and carried out.

    python examples/my_own_schedule.py

Uses nanotrain.parallel.pp alone, with a torch module that nanotrain has never seen. Here every microbatch goes
forward before the first goes backward: the gradients are the same as those of nanotrain's own one-stage schedule, and
what differs, the number of microbatches whose activations are alive at once, is read off the schedule beforehand.
"""

import torch
from torch import Tensor, nn

from nanotrain.data.batch import Batch
from nanotrain.parallel.pp.actions import Action, ActionKind, PipelineShape, Schedule
from nanotrain.parallel.pp.executor import Pipeline, RunnableStage, run_schedule
from nanotrain.parallel.pp.schedules import one_stage


def all_forward_first(num_microbatches: int) -> Schedule:
    """Every microbatch forward, then every one backward, the last one first."""
    forwards = [Action(ActionKind.forward, 0, m) for m in range(num_microbatches)]
    backwards = [Action(ActionKind.backward, 0, m) for m in reversed(range(num_microbatches))]
    return Schedule(((*forwards, *backwards),))


def most_alive(schedule: Schedule) -> int:
    """How many microbatches are between their forward and their backward at once: the price in memory."""
    alive = peak = 0
    for action in schedule.actions[0]:
        alive += 1 if action.kind is ActionKind.forward else -1
        peak = max(peak, alive)
    return peak


class Bigram(nn.Module):
    """Predicts a token from the one before it; the whole model is one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 50)

    def forward(self, hidden: Tensor | None, batch: Batch) -> Tensor:
        """The summed loss of a microbatch."""
        return nn.functional.cross_entropy(
            self.table(batch.tokens).flatten(0, 1), batch.labels.flatten(), reduction="sum"
        )


def gradient(schedule: Schedule, batches: list[Batch]) -> Tensor:
    """Carry a schedule out on a fresh model."""
    torch.manual_seed(0)
    model = Bigram()
    run_schedule(schedule, {0: RunnableStage(model)}, microbatches=batches, grad_scale=1.0, pipeline=Pipeline.alone())
    assert model.table.weight.grad is not None
    return model.table.weight.grad


def main() -> None:
    """Draw both schedules and compare what they give."""
    torch.manual_seed(1)
    tokens = torch.randint(50, (4, 2, 17))
    batches = [Batch(t[:, :-1], t[:, 1:], torch.ones(2, 16)) for t in tokens]
    schedules = {"one_stage": one_stage(PipelineShape(1, 1, 4)), "all_forward_first": all_forward_first(4)}
    for name, schedule in schedules.items():
        print(f"{name:18}", *schedule.actions[0], f"  at most {most_alive(schedule)} alive")
    ours, theirs = (gradient(schedule, batches) for schedule in schedules.values())
    print("same gradient:", torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6))


if __name__ == "__main__":
    main()
