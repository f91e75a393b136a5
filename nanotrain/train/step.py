"""The train step: forward and backward of every microbatch, gradient reduction, parameter update.

The host queues the work of a step and waits for nothing (law L10). Loss, gradient norm and whether
the step was skipped stay on the device until the log reads them from `StepOutput`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from nanotrain.comm.collectives import all_reduce, all_reduce_coalesced
from nanotrain.comm.device import HostCopy
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.comm.stop_point import PassStopped
from nanotrain.model.context import BatchContext
from nanotrain.optim.distributed import Update
from nanotrain.parallel.dp.param_buffer import ParamBuffer
from nanotrain.parallel.pp.executor import run_schedule
from nanotrain.train.batches import GlobalBatch, StepSettings
from nanotrain.train.parts.part import StepParts
from nanotrain.train.run import Run


class StepNumbers(NamedTuple):
    """Numbers of every step, in the order in which they are copied from the device."""

    loss_sum: float  # cross-entropy summed over the target tokens of the global batch
    grad_norm: float
    skipped: float  # 1 if no parameter changed
    loss_scale: float
    local_fault: float


@dataclass(frozen=True)
class StepOutput:
    """Outcome of one step, equal on every rank; its numbers are read when they are first used."""

    copy: HostCopy  # `StepNumbers`, then the numbers of the parts, in one tensor
    sizes: Mapping[str, int]  # number of values per part
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
        """Start to copy the numbers of the step that `run` has just done to the host.

        Args:
            run: run whose counters have not advanced yet.
            batch: this rank's part of the global batch.
            update: result of the optimizer step.
            numbers: numbers of each part.
            local_loss: summed loss of this rank.
        """
        loss = update.sums[:1]
        local_fault = torch.where(local_loss.isfinite(), ~update.local_finite, 2)
        copied = [  # in the order of `StepNumbers`
            loss,
            update.grad_norm[None],
            update.skipped[None],
            torch.ones_like(loss) * update.loss_scale,
            local_fault[None],
            *numbers.values(),
        ]
        return cls(
            HostCopy(torch.cat(copied)),
            {name: len(values) for name, values in numbers.items()},
            run.parts,
            num_tokens=max(batch.num_target_tokens, 1),
            settings=batch.settings,
        )

    @property
    def is_ready(self) -> bool:
        """Whether the numbers can be read without waiting."""
        return self.copy.is_ready

    @cached_property
    def _values(self) -> list[float]:
        """All numbers; reading them waits for the end of the step."""
        return self.copy.read()

    @cached_property
    def numbers(self) -> StepNumbers:
        """The numbers of every step."""
        return StepNumbers(*self._values[: len(StepNumbers._fields)])

    @property
    def loss(self) -> float:
        """Mean cross-entropy over the target tokens of the global batch, before the update."""
        return self.numbers.loss_sum / self.num_tokens

    @property
    def grad_norm(self) -> float:
        """Global 2-norm before clipping."""
        return self.numbers.grad_norm

    @property
    def skipped(self) -> bool:
        """True if the gradient norm was not finite; no weight changed."""
        return bool(self.numbers.skipped)

    @property
    def loss_scale(self) -> float:
        """Factor of the loss in this step."""
        return self.numbers.loss_scale

    @property
    def local_fault(self) -> int:
        """2 if this rank's loss is not finite, 1 if only its gradient shards are not, else 0."""
        return int(self.numbers.local_fault)

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """Metrics of the parts."""
        values = iter(self._values[len(StepNumbers._fields) :])
        numbers = {name: list(islice(values, size)) for name, size in self.sizes.items()}
        return self.parts.metrics(numbers)


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
    with reduced_grads(run):
        loss_sum = forward_backward(run, batch)
    sums = collect_sums(run, loss_sum, is_logged=is_logged)
    update = run.optimizer.step(**batch.settings.rates, sums=sums)
    numbers = run.parts.after_update(update, update.sums[1:], is_logged=is_logged)
    run.start_param_gather()
    output = StepOutput.of(run, batch, update=update, numbers=numbers, local_loss=loss_sum)
    run.state.advance(samples=batch.settings.num_samples, tokens=batch.num_target_tokens)
    return output


def train_step_with_repeats(run: Run, batch: GlobalBatch, *, is_logged: bool = True) -> StepOutput:
    """`train_step`; a part can have a skipped step repeated with the same batch.

    The host waits for a step only if a part may want its repetition.
    """
    output = train_step(run, batch, is_logged=is_logged)
    for part in run.parts:
        if part.may_repeat and part.wants_repeat(output.metrics):
            local_fault = output.local_fault
            take_back_step(run, batch)
            with part.repeating():
                output = train_step(run, batch, is_logged=is_logged)
            part.repeated(output.metrics, local_fault=local_fault)
    return output


def take_back_step(run: Run, batch: GlobalBatch) -> None:
    """Return to the state before a skipped step: counters, loss scale and the state of parts."""
    run.state.take_back(samples=batch.settings.num_samples, tokens=batch.num_target_tokens)
    run.optimizer.loss_scale.take_back()
    for part in run.parts:
        part.take_back()
    # the weights that travel may be cast with scales of the step
    run.wait_for_params()
    run.start_param_gather()


def forward_backward(run: Run, batch: GlobalBatch) -> Tensor:
    """Run the pipeline schedule of this rank over its microbatches; returns its summed loss."""
    loss_scale = run.loss_scale / max(batch.num_target_tokens, 1)
    return run_schedule(
        run.schedules.of(len(batch.microbatches)),
        run.runnable,
        microbatches=microbatch_contexts(run, batch, loss_scale=loss_scale),
        grad_scale=loss_scale,
        pipeline=replace(run.pipeline, hidden_shape=batch.settings.hidden_shape),
    )


@contextmanager
def reduced_grads(run: Run) -> Iterator[None]:
    """Reduce the gradients of the block: after it, this rank's shard of their sums is complete."""
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


def microbatch_contexts(
    run: Run, batch: GlobalBatch, *, loss_scale: float | Tensor
) -> list[BatchContext]:
    """The microbatches of a step with loss scales, dropout seed and the fields of the parts."""
    fields = run.parts.context(batch)
    fields["cp"] = run.context.groups["cp"]
    fields["dropout_seed"] = batch.settings.dropout_seed
    fields["aux_loss_scale"] = run.loss_scale / batch.settings.num_sequences
    # given the scale, the loss adds gradients in its forward pass: no backward may run meanwhile
    if not run.config.parallel.overlap_moe_expert_parallel_comm:
        fields["loss_scale"] = loss_scale
    return [BatchContext.of(microbatch, **fields) for microbatch in batch.microbatches]


def collect_sums(run: Run, loss_sum: Tensor, *, is_logged: bool) -> Tensor:
    """[n] fp64, the loss and the sums of the parts, for the all-reduce of the gradient norm.

    One all-reduce for all, before the all-gathers of parameters are queued behind it.
    """
    loss = _once_per_tp_group(loss_sum, run.context)
    return torch.cat([loss, run.parts.sums(is_logged=is_logged)])


def finalize_grads(data_parallel: Sequence[ParamBuffer], context: ParallelContext) -> None:
    """All-reduce, in place, the reduced gradients that need a sum over further axes.

        tp      parameters used on sequence shards or on some heads only: norms under sequence
                parallel, q/k norms, routers, replicated key and value projections
        embed   the tied embedding: embedding of the first stage, output layer of the last;
                perhaps on the same rank

    Source: Megatron-LM, `finalize_model_grads.py`. There the sums run before the reduce-scatter,
    over full gradients; here they run after it, over 1/d of the bytes.

    Args:
        data_parallel: wrappers of this rank, whose gradient shards are reduced.
        context: a rank between the first and the last stage has no `embed` group.
    """
    tp = [grad for dp in data_parallel for grad in dp.grads_summed_over("tp")]
    all_reduce_coalesced(tp, context.groups["tp"])
    embed = context.groups.get("embed")
    if embed is None:
        return
    # one list per end of the model on this rank; both ends of a V are summed here
    ends = [grads for dp in data_parallel if (grads := dp.grads_summed_over("embed"))]
    first = ends[0] if ends else []
    for replicas in ends[1:]:
        for grad, replica in zip(first, replicas, strict=True):
            replica.copy_(grad.add_(replica))
    all_reduce_coalesced(first, embed)


def global_loss(loss_sum: Tensor, context: ParallelContext) -> float:
    """The loss summed over all ranks, on the host, which waits for it; used by validation.

    Args:
        loss_sum: scalar; zero on ranks without the output layer, equal on all ranks of a tp group.
        context: device and groups of this rank.
    """
    total = _once_per_tp_group(loss_sum, context)
    all_reduce(total, context.group("world"))
    return HostCopy(total).read()[0]


def _once_per_tp_group(loss_sum: Tensor, context: ParallelContext) -> Tensor:
    """[1] fp64, the loss on the first rank of a tp group, zero on the others."""
    return context.groups["tp"].once(loss_sum.double()[None])
