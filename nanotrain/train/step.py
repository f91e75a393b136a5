"""The train step, the best-known function of the project."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from nanotrain.comm.collectives import all_reduce_scalars
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.model.router_load import RouterLoad
from nanotrain.parallel.pp.executor import run_schedule
from nanotrain.train.batches import GlobalBatch
from nanotrain.train.finalize import finalize_grads
from nanotrain.train.routers import balance_routers
from nanotrain.train.run import Run


@dataclass(frozen=True)
class StepResult:
    """What one step did; the same on every rank.

    Attributes:
        loss: mean cross-entropy over all target tokens of the global batch, before the update; what was optimized.
        grad_norm: global 2-norm before clipping.
        lr: the learning rate that was used.
        skipped: whether a norm that was not finite kept every weight as it was.
        router_loads: what each router has chosen, by name; empty for a dense model.
    """

    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    router_loads: Mapping[str, RouterLoad] = field(default_factory=dict)


def train_step(run: Run, batch: GlobalBatch) -> StepResult:
    """One optimizer step: every microbatch forward and backward, then one update."""
    lr = run.lr_schedule.lr_at(run.state.consumed_samples)
    num_tokens, loss_scale = max(batch.num_target_tokens, 1), run.optimizer.loss_scale.scale
    microbatches = [replace(part, aux_scale=loss_scale / batch.num_samples) for part in batch.microbatches]

    for layer in run.data_parallel:
        layer.begin_step()
    loss_sum = run_schedule(
        run.schedule,
        run.runnable,
        microbatches=microbatches,
        grad_scale=loss_scale / num_tokens,
        pipeline=run.pipeline,
    )
    for layer in run.data_parallel:
        layer.finish_grad_reduce()
    finalize_grads(run.data_parallel, run.context)
    update = run.optimizer.step(lr)
    for layer in run.data_parallel:
        layer.start_param_gather()

    loss = global_loss(loss_sum, run.context)
    loads = balance_routers(run.stages, run.config.model, context=run.context)
    run.state.advance(samples=run.place.global_batch_size, tokens=batch.num_target_tokens)
    return StepResult(loss / num_tokens, update.grad_norm, lr=lr, skipped=update.skipped, router_loads=loads)


def global_loss(loss_sum: Tensor, context: ParallelContext) -> float:
    """The summed loss of all ranks, for all ranks.

    Args:
        loss_sum: this rank's, zero where its stages have no head; all tp ranks have the same, so one of them counts.
        context: the groups.
    """
    own = loss_sum.item() if context.group("tp").is_first else 0.0
    (total,) = all_reduce_scalars([own], context.group("world"))
    return total
