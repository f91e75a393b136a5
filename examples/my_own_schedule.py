"""Write a pipeline schedule: one pure function and one row in SCHEDULES.

    python examples/my_own_schedule.py

Uses only nanotrain.parallel.pp, with a torch module of its own. Microbatches run in pairs: two
forward, then the same two backward. With its row in SCHEDULES the schedule has a name, for
`--pipeline-schedule in_pairs` and for drawing. Gradients equal those of the other schedules; bubble
and memory are computed before anything runs.
"""

import torch
from torch import Tensor, nn

from nanotrain.data.batch import Batch
from nanotrain.parallel.pp.actions import PipelineShape, Schedule, forward, full_backward
from nanotrain.parallel.pp.draw import draw_schedule
from nanotrain.parallel.pp.executor import Pipeline, RunnableStage, run_schedule
from nanotrain.parallel.pp.schedules import SCHEDULES
from nanotrain.parallel.pp.transfers import plan_rank


def in_pairs(shape: PipelineShape) -> Schedule:
    """Two microbatches forward, the same two backward, then the next two; one stage per rank."""
    pairs = [
        range(m, min(m + 2, shape.num_microbatches)) for m in range(0, shape.num_microbatches, 2)
    ]
    return Schedule(
        tuple(
            tuple(
                make(stage, m) for pair in pairs for make in (forward, full_backward) for m in pair
            )
            for stage in range(shape.num_ranks)
        )
    )


SCHEDULES["in_pairs"] = in_pairs


class Bigram(nn.Module):
    """Predicts a token from the previous one; the model is one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 50)

    def forward(self, hidden: Tensor | None, batch: Batch) -> Tensor:
        """The summed loss of a microbatch."""
        return nn.functional.cross_entropy(
            self.table(batch.tokens).flatten(0, 1), batch.labels.flatten(), reduction="sum"
        )


def gradient(schedule: Schedule, batches: list[Batch]) -> Tensor:
    """Run a schedule with a new model on this process."""
    torch.manual_seed(0)
    model = Bigram()
    run_schedule(
        plan_rank(schedule, 0),
        {0: RunnableStage(model)},
        microbatches=batches,
        grad_scale=1.0,
        pipeline=Pipeline.single_rank(),
    )
    assert model.table.weight.grad is not None
    return model.table.weight.grad


def main() -> None:
    """Draw two schedules for a pipeline of two ranks, and compare their gradients on one."""
    torch.manual_seed(1)
    tokens = torch.randint(50, (4, 2, 17))
    batches = [Batch(t[:, :-1], t[:, 1:], torch.ones(2, 16)) for t in tokens]
    names = ("in_pairs", "1f1b")
    for name in names:
        print(
            draw_schedule(
                name, PipelineShape(num_ranks=2, num_stages_per_rank=1, num_microbatches=4)
            )
            + "\n"
        )
    ours, theirs = (gradient(SCHEDULES[name](PipelineShape(1, 1, 4)), batches) for name in names)
    print("same gradient:", torch.equal(ours, theirs))


if __name__ == "__main__":
    main()
