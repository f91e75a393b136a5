"""The train step: forward and backward of every microbatch, gradient reduction, parameter update.

The host queues the work of a step and waits for nothing (law L10): loss, gradient norm and whether
the step was skipped stay on the device until they are read from `StepOutput`, which is done for the
log.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, Self

import torch
from torch import Tensor

from nanotrain.comm.collectives import all_reduce, all_reduce_coalesced
from nanotrain.comm.device import HostCopy
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.comm.stop_point import PassStopped
from nanotrain.model.context import BatchContext
from nanotrain.optim.distributed import Update
from nanotrain.parallel.dp.data_parallel import DataParallel
from nanotrain.parallel.pp.executor import run_schedule
from nanotrain.train.batches import GlobalBatch, StepSettings
from nanotrain.train.parts.part import StepParts
from nanotrain.train.run import Run


@dataclass(frozen=True)
class StepOutput:
    """The outcome of one step, equal on every rank; its numbers are read from the device when they
    are first used.
    """

    copy: HostCopy  # the numbers of the step in one tensor
    sizes: Mapping[str, int]  # numbers of each part among them, after the five of every step
    parts: StepParts
    num_tokens: int  # target tokens of the global batch
    settings: StepSettings  # learning rate and batch size of this step

    @classmethod
    def of(
        cls,
        run: Run,
        batch: GlobalBatch,
        *,
        update: Update,
        numbers: Mapping[str, Tensor],
        local_loss: Tensor,
    ) -> Self:
        """Start to copy the numbers of the step that `run` has just done, before its counters
        advance.
        """
        loss = update.sums[:1]
        local_fault = torch.where(local_loss.isfinite(), ~update.local_finite, 2)
        always = (
            loss,
            update.grad_norm[None],
            update.skipped[None],
            torch.ones_like(loss) * update.loss_scale,
        )
        return cls(
            HostCopy(torch.cat([*always, local_fault[None], *numbers.values()])),
            {name: len(own) for name, own in numbers.items()},
            run.parts,
            num_tokens=max(batch.num_target_tokens, 1),
            settings=batch.settings,
        )

    @property
    def is_ready(self) -> bool:
        """Whether the numbers can be read without waiting."""
        return self.copy.is_ready

    @cached_property
    def numbers(self) -> list[float]:
        """All numbers; reading them waits for the end of the step."""
        return self.copy.read()

    @property
    def loss(self) -> float:
        """Mean cross-entropy over the target tokens of the global batch, before the update."""
        return self.numbers[0] / self.num_tokens

    @property
    def grad_norm(self) -> float:
        """Global 2-norm before clipping."""
        return self.numbers[1]

    @property
    def skipped(self) -> bool:
        """True if the gradient norm was not finite; no weight changed."""
        return bool(self.numbers[2])

    @property
    def loss_scale(self) -> float:
        """Factor of the loss in this step."""
        return self.numbers[3]

    @property
    def local_fault(self) -> int:
        """2 if the loss of this rank is not finite, 1 if only its shards of the reduced gradients
        are not, else 0.
        """
        return int(self.numbers[4])

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """What the parts report."""
        numbers = iter(self.numbers[5:])
        return self.parts.metrics(
            {name: list(islice(numbers, size)) for name, size in self.sizes.items()}
        )


def train_step(run: Run, batch: GlobalBatch, *, is_logged: bool = True) -> StepOutput:
    """One optimizer step.

    Args:
        run: run whose parameters and counters change.
        batch: this rank's part of the global batch.
        is_logged: whether to measure what is measured for the log only.

    Raises:
        PassStopped: a rank received a signal between microbatches. Weights and counters are those
            before the step, on every rank; the statistics of the step are not reset, as the run
            ends.
    """
    settings, scale = batch.settings, run.loss_scale / max(batch.num_target_tokens, 1)
    schedule, microbatches = (
        run.schedules.of(len(batch.microbatches)),
        contexts(run, batch, loss_scale=scale),
    )
    pipeline = replace(run.pipeline, hidden_shape=settings.hidden_shape)
    with reduced_grads(run):
        loss_sum = run_schedule(
            schedule, run.runnable, microbatches=microbatches, grad_scale=scale, pipeline=pipeline
        )
    update = run.optimizer.step(**settings.rates, sums=sums_of(run, loss_sum, is_logged=is_logged))
    numbers = run.parts.after_update(update, update.sums[1:], is_logged=is_logged)
    run.start_param_gather()
    output = StepOutput.of(run, batch, update=update, numbers=numbers, local_loss=loss_sum)
    run.state.advance(samples=settings.num_samples, tokens=batch.num_target_tokens)
    return output


@contextmanager
def reduced_grads(run: Run) -> Iterator[None]:
    """Start the reduction of gradients; after the block this rank's shard of their sums over ranks
    is complete.
    """
    for dp in run.data_parallel:
        dp.begin_step()
    try:
        yield
    except PassStopped:
        for dp in run.data_parallel:
            dp.finish_grad_reduce(is_abandoned=True)
        raise
    run.context.heartbeat.begin("grad-reduce")
    for dp in run.data_parallel:
        dp.finish_grad_reduce()
    finalize_grads(run.data_parallel, run.context)
    run.context.heartbeat.begin("optimizer")


def contexts(run: Run, batch: GlobalBatch, *, loss_scale: float | Tensor) -> list[BatchContext]:
    """The microbatches of the next step with loss scales, dropout seed and the fields of the parts."""
    cp, fields, seed = (
        run.context.groups["cp"],
        run.parts.context(batch),
        batch.settings.dropout_seed,
    )
    fields |= {"aux_loss_scale": run.loss_scale / batch.settings.num_sequences}
    # no backward runs while the loss adds gradients
    if not run.config.parallel.overlap_moe_expert_parallel_comm:
        fields |= {"loss_scale": loss_scale}
    return [
        BatchContext.of(part, cp=cp, dropout_seed=seed, **fields) for part in batch.microbatches
    ]


def sums_of(run: Run, loss_sum: Tensor, *, is_logged: bool) -> Tensor:
    """[n] fp64, what joins the all-reduce of the gradient norm: the loss, and the sums of the
    parts.

    One all-reduce for all, before the all-gathers of parameters are queued behind it.
    """
    return torch.cat(
        [_once_per_tp_group(loss_sum, run.context), run.parts.sums(is_logged=is_logged)]
    )


def finalize_grads(data_parallel: Sequence[DataParallel], context: ParallelContext) -> None:
    """All-reduce, in place, the gradients that need a sum over further axes after the data-parallel
    reduction.

        tp      parameters used on sequence shards or on some heads only: norms under sequence parallel, q/k norms,
                routers, replicated key and value projections
        embed   the tied embedding: embedding of the first stage, output layer of the last; perhaps on the same rank

    Source: Megatron-LM, `finalize_model_grads.py`. There the sums run before the reduce-scatter,
    over full gradients; here they run after it, over 1/d of the bytes.

    Args:
        data_parallel: wrappers of this rank, whose gradient shards are reduced.
        context: a rank between the first and the last stage has no `embed` group.
    """
    tp = [grad for dp in data_parallel for grad in dp.grads_summed_over("tp")]
    all_reduce_coalesced(tp, context.group("tp"))
    if (embed := context.groups.get("embed")) is not None:
        # by stage of this rank: one, or both ends of a V, whose replicas are summed here
        first, *others = [
            grads for dp in data_parallel if (grads := dp.grads_summed_over("embed"))
        ] or [[]]
        for grad, *replicas in zip(first, *others, strict=True):
            for replica in replicas:
                replica.copy_(grad.add_(replica))
        all_reduce_coalesced(first, embed)


def global_loss(loss_sum: Tensor, context: ParallelContext) -> float:
    """The loss summed over all ranks, on the host, which waits for it; used by validation.

    Args:
        loss_sum: scalar; zero on ranks without the output layer, equal on all ranks of a tp group.
        context: the groups.
    """
    total = _once_per_tp_group(loss_sum, context)
    all_reduce(total, context.group("world"))
    return HostCopy(total).read()[0]


def _once_per_tp_group(loss_sum: Tensor, context: ParallelContext) -> Tensor:
    """[1] fp64, a loss that is equal on all ranks of a tp group: zero on all but the first, so that
    it counts once.
    """
    loss = loss_sum.double()[None]
    return loss if context.groups["tp"].is_first else torch.zeros_like(loss)
