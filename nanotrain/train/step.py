"""The train step, the best-known function of the project."""

from dataclasses import dataclass

from torch import Tensor

from nanotrain.comm.collectives import all_reduce_numbers
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.parallel.pp.executor import run_schedule
from nanotrain.train.feed import GlobalBatch
from nanotrain.train.finalize import finalize_grads
from nanotrain.train.run import Run


@dataclass(frozen=True)
class StepResult:
    """What one step did; the same on every rank.

    Attributes:
        loss: mean cross-entropy over all target tokens of the global batch, before the update; what was optimized.
        grad_norm: global 2-norm before clipping.
        lr: the learning rate that was used.
        skipped: whether a norm that was not finite kept every weight as it was.
    """

    loss: float
    grad_norm: float
    lr: float
    skipped: bool


def train_step(run: Run, batch: GlobalBatch) -> StepResult:
    """One optimizer step: every microbatch forward and backward, then one update."""
    lr = run.lr_schedule.lr_at(run.state.consumed_samples)
    num_tokens = max(batch.num_target_tokens, 1)

    for layer in run.layers:
        layer.begin_step()
    loss_sum = run_schedule(
        run.schedule,
        run.runnable,
        microbatches=batch.microbatches,
        grad_scale=run.optimizer.loss_scale.scale / num_tokens,
        pipeline=run.pipeline,
    )
    for layer in run.layers:
        layer.finish_grad_reduce()
    finalize_grads(run.layers, run.context)
    update = run.optimizer.step(lr)
    for layer in run.layers:
        layer.start_param_gather()

    loss = global_loss(loss_sum, run.context)
    run.state.advance(samples=run.place.global_batch_size, tokens=batch.num_target_tokens)
    return StepResult(loss=loss / num_tokens, grad_norm=update.grad_norm, lr=lr, skipped=update.skipped)


def global_loss(loss_sum: Tensor, context: ParallelContext) -> float:
    """The summed loss of all ranks, for all ranks.

    Args:
        loss_sum: this rank's, zero where its stages have no head; all tp ranks have the same, so one of them counts.
        context: the groups.
    """
    own = loss_sum.item() if context.group("tp").is_first else 0.0
    (total,) = all_reduce_numbers([own], context.group("world"))
    return total
