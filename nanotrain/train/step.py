"""The train step, and what belongs to it: the remaining gradient sums after backward, and the global loss.

The host queues the work of a step and waits for nothing (law L10): loss, gradient norm and whether the step was skipped
stay on the device until `StepOutput.read`, which is called for the log.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Self

import torch
from torch import Tensor

from nanotrain.comm.collectives import all_reduce
from nanotrain.comm.device import HostCopy
from nanotrain.comm.group import Group
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.comm.stop_point import PassStopped
from nanotrain.config.config import ModelConfig
from nanotrain.config.derive import has_dropout
from nanotrain.model.context import BatchContext
from nanotrain.model.mtp import take_loss_sums
from nanotrain.model.router_stats import RouterMetrics
from nanotrain.optim.distributed import Update
from nanotrain.optim.group_norms import GroupNorms
from nanotrain.parallel.dp.data_parallel import DataParallel
from nanotrain.parallel.pp.executor import run_schedule
from nanotrain.topology.groups import GroupName
from nanotrain.train.batches import GlobalBatch
from nanotrain.train.fp8 import finish_fp8_step
from nanotrain.train.metrics.source_losses import SourceLosses
from nanotrain.train.qk_clip import clip_query_key
from nanotrain.train.routers import ModelRouters
from nanotrain.train.run import Run

GRAD_SUM_AXES: tuple[GroupName, ...] = ("tp", "embed")


@dataclass(frozen=True)
class StepResult:
    """The outcome of one step on the host, equal on every rank."""

    loss: float  # mean cross-entropy over the target tokens of the global batch, before the update
    grad_norm: float  # global 2-norm before clipping
    lr: float  # learning rate of this step
    num_samples: int  # of the global batch
    skipped: bool  # True if the gradient norm was not finite; no weight changed
    # routing statistics by router name; empty for a dense model
    router_metrics: Mapping[str, RouterMetrics] = field(default_factory=dict)
    decoupled_lr: float | None = None  # learning rate of the embedding and the output layer; None where it is `lr`
    loss_scale: float = 1.0  # of this step
    mtp_losses: tuple[float, ...] = ()  # mean cross-entropy of each layer of multi-token prediction over its targets
    source_losses: Mapping[str, float] | None = None  # mean by corpus, since the last logged step; None without
    norms: Mapping[str, Mapping[str, float]] | None = None  # by kind and group of parameters; None where not measured


@dataclass(frozen=True)
class PackedNumbers:
    """Named vectors of numbers on the device, copied to the host as one tensor."""

    copy: HostCopy
    sizes: Mapping[str, int]  # numbers of each vector, in order

    @classmethod
    def of(cls, vectors: Mapping[str, Tensor]) -> Self:
        """Start to copy the vectors; see `HostCopy`."""
        return cls(HostCopy(torch.cat([*vectors.values()])), {name: len(vector) for name, vector in vectors.items()})

    def read(self) -> dict[str, list[float]]:
        """The numbers of every vector; waits for the copy."""
        numbers = iter(self.copy.read())
        return {name: list(islice(numbers, size)) for name, size in self.sizes.items()}


@dataclass(frozen=True)
class StepOutput:
    """The outcome of one step on the device."""

    # loss (summed over tokens), grad_norm, skipped, loss_scale, mtp_losses (summed), source_losses (sums by corpus),
    # norms (by group), routers (sums)
    numbers: PackedNumbers
    num_tokens: int  # target tokens of the global batch
    lr: float
    decoupled_lr: float | None
    num_samples: int  # of the global batch
    routers: ModelRouters
    num_mtp_tokens: tuple[int, ...] = ()  # target tokens of each layer of multi-token prediction
    norms: GroupNorms | None = None  # of the norms among the numbers; None where there are none
    sources: SourceLosses | None = None  # of the sums by corpus among the numbers; None where there are none

    @property
    def is_ready(self) -> bool:
        """Whether `read` returns without waiting."""
        return self.numbers.copy.is_ready

    def read(self) -> StepResult:
        """The numbers on the host, which waits for the end of the step."""
        numbers = self.numbers.read()
        mtp_losses = zip(numbers["mtp_losses"], self.num_mtp_tokens, strict=True)
        return StepResult(
            numbers["loss"][0] / self.num_tokens,
            numbers["grad_norm"][0],
            lr=self.lr,
            num_samples=self.num_samples,
            skipped=bool(numbers["skipped"][0]),
            router_metrics=self.routers.metrics(numbers["routers"]),
            decoupled_lr=self.decoupled_lr,
            loss_scale=numbers["loss_scale"][0],
            mtp_losses=tuple(total / max(num_tokens, 1) for total, num_tokens in mtp_losses),
            norms=None if self.norms is None else self.norms.by_group(numbers["norms"]),
            source_losses=None if self.sources is None else self.sources.by_name(numbers["source_losses"]),
        )


def train_step(
    run: Run, batch: GlobalBatch, *, is_logged: bool = True, before_update: Callable[[], None] = lambda: None
) -> StepOutput:
    """One optimizer step: forward and backward of every microbatch, gradient reduction, parameter update.

    Args:
        run: its parameters and counters change.
        batch: this rank's part of the global batch.
        is_logged: whether to measure norms by group, where the run logs them.
        before_update: called once all gradients are reduced.

    Raises:
        PassStopped: a rank received a signal between microbatches. Weights and counters are those before the step, on
            every rank; the statistics of the step are not reset, as the run ends.
    """
    consumed, norms = run.state.consumed_samples, run.group_norms if is_logged else None
    lr, decoupled_lr = run.lr_schedule.lr_at(consumed), run.lr_schedule.decoupled_lr_at(consumed)
    num_tokens, scale = max(batch.num_target_tokens, 1), run.optimizer.loss_scale.scale
    loss_scale = scale * run.plan.num_averaged_ranks  # gradient averaging divides by the second factor
    num_samples = run.plan.sampler.size_at(consumed)
    loss_sum = _compute_grads(run, batch, num_tokens=num_tokens, loss_scale=loss_scale)
    before_update()
    before = None if norms is None else norms.start()
    # One all-reduce sums loss and norm, before the all-gathers of parameters are queued behind it.
    sums = _sums(run, loss_sum, is_logged=is_logged)
    weight_decay = run.lr_schedule.weight_decay_at(consumed)
    update = run.optimizer.step(lr, decoupled_lr=decoupled_lr, weight_decay=weight_decay, sums=sums)
    _change_params(run, update)
    measured = None if norms is None or before is None else norms.finish(before, loss_scale=scale)
    for dp in run.data_parallel:
        dp.start_param_gather()

    num_mtp = len(batch.num_mtp_tokens)
    loss, mtp_losses, source_losses = update.sums.tensor_split((1, 1 + num_mtp))
    none = loss[:0]
    router_sums = run.routers.balance()
    numbers = {
        "loss": loss,
        "grad_norm": update.grad_norm[None],
        "skipped": update.skipped[None],
        "loss_scale": torch.full_like(loss, 1.0) * scale,
        "mtp_losses": mtp_losses,
        "source_losses": source_losses,
        "norms": none if measured is None else measured,
        "routers": none if router_sums is None else router_sums,
    }
    run.state.advance(samples=num_samples, tokens=batch.num_target_tokens)
    return StepOutput(
        PackedNumbers.of(numbers),
        num_tokens,
        lr=lr,
        decoupled_lr=decoupled_lr,
        num_samples=num_samples,
        routers=run.routers,
        num_mtp_tokens=batch.num_mtp_tokens,
        norms=norms,
        sources=run.source_losses if is_logged else None,
    )


def _compute_grads(run: Run, batch: GlobalBatch, *, num_tokens: int, loss_scale: float | Tensor) -> Tensor:
    """Forward and backward of every microbatch, and the sums of their gradients over ranks.

    Args:
        num_tokens: target tokens of the global batch; the loss is divided by this number.
        loss_scale: factor of the loss, which the reduction and the optimizer divide by.

    Returns:
        Scalar: this rank's part of the loss summed over tokens. This rank's shard of the gradients is complete.

    Raises:
        PassStopped: as `train_step`; the reductions in flight are complete.
    """
    consumed = run.state.consumed_samples
    microbatches = _contexts(run, batch, aux_loss_scale=loss_scale / run.plan.num_sequences_at(consumed))
    for dp in run.data_parallel:
        dp.begin_step()
    try:
        loss_sum = run_schedule(
            run.schedules.of(len(microbatches)),
            run.runnable,
            microbatches=microbatches,
            grad_scale=loss_scale / num_tokens,
            pipeline=run.pipeline_of(run.plan.seq_length_at(consumed)),
        )
    except PassStopped:
        for dp in run.data_parallel:
            dp.finish_grad_reduce(is_abandoned=True)
        raise
    for dp in run.data_parallel:
        dp.finish_grad_reduce()
    finalize_grads(run.data_parallel, run.context)
    return loss_sum


def _sums(run: Run, loss_sum: Tensor, *, is_logged: bool) -> Tensor:
    """[n] fp64, this rank's part of the sums over all ranks: loss, losses of multi-token prediction, of each corpus."""
    losses = _once_per_tp_group(torch.cat([loss_sum.double()[None], _mtp_loss_sums(run)]), run.context)
    return losses if run.source_losses is None or not is_logged else torch.cat([losses, run.source_losses.take()])


def _change_params(run: Run, update: Update) -> None:
    """Change the main params after the update rule and before the all-gather: QK-clip, moving average, fp8 scales."""
    if run.config.optim.qk_clip:
        clip_query_key(run, skipped=update.skipped)
    run.optimizer.average.update(update.skipped)
    if run.config.precision.fp8_format is not None:
        finish_fp8_step(run.stages, run.context)  # the gathers quantize with the scales of the next step


def _contexts(run: Run, batch: GlobalBatch, *, aux_loss_scale: float | Tensor) -> list[BatchContext]:
    """The microbatches of a step with the step's loss scales and dropout seed."""
    seed = run.config.train.seed if has_dropout(run.config.model) else None
    mtp_scales, cp = mtp_loss_scales(run.config.model, batch), run.context.group("cp")
    return [
        BatchContext.of(part, cp=cp, aux_loss_scale=aux_loss_scale, dropout_seed=seed, mtp_scales=mtp_scales)
        for part in batch.microbatches
    ]


def mtp_loss_scales(model_config: ModelConfig, batch: GlobalBatch) -> tuple[float, ...]:
    """The factors of the summed losses of multi-token prediction, in the units of the model's summed loss.

    Each layer's loss is a mean over its own target tokens, and the mean over layers is scaled.
    """
    factor = model_config.mtp.loss_scaling_factor / max(1, len(batch.num_mtp_tokens))
    return tuple(factor * max(batch.num_target_tokens, 1) / max(num_tokens, 1) for num_tokens in batch.num_mtp_tokens)


def _mtp_loss_sums(run: Run) -> Tensor:
    """[layers] fp64, this rank's part of the summed losses of multi-token prediction in this step."""
    layers = [layer for stage in run.stages.values() for layer in stage.mtp_layers]
    return take_loss_sums(layers, num_layers=run.plan.shape.num_mtp_layers, device=run.context.device)


def finalize_grads(data_parallel: Sequence[DataParallel], context: ParallelContext) -> None:
    """All-reduce, in place, the gradients that need a sum over further axes after the data-parallel reduction.

        tp      parameters used on sequence shards or on some heads only: norms under sequence parallel, q/k norms,
                routers, replicated key and value projections
        embed   the tied embedding: embedding of the first stage, output layer of the last

    Source: Megatron-LM, `finalize_model_grads.py`. There the sums run before the reduce-scatter, over full gradients;
    here they run after it, over 1/d of the bytes.

    Args:
        data_parallel: of this rank; gradient shards are reduced.
        context: a rank between the first and the last stage has no `embed` group.
    """
    for axis in GRAD_SUM_AXES:
        group = context.groups.get(axis)
        if group is None or group.size == 1:
            continue
        grads = [grad for dp in data_parallel for grad in dp.grads_summed_over(axis)]
        if grads:
            _all_reduce_coalesced(grads, group)


def global_loss(loss_sum: Tensor, context: ParallelContext) -> float:
    """The loss summed over all ranks, on the host, which waits for it; used by validation.

    Args:
        loss_sum: scalar; zero on ranks without the output layer, equal on all ranks of a tp group.
        context: the groups.
    """
    total = _once_per_tp_group(loss_sum.double()[None], context)
    all_reduce(total, context.group("world"))
    return HostCopy(total).read()[0]


def _once_per_tp_group(sums: Tensor, context: ParallelContext) -> Tensor:
    """Sums that are equal on all ranks of a tp group, zeroed on all but the first so that each is counted once."""
    return sums if context.group("tp").is_first else torch.zeros_like(sums)


def _all_reduce_coalesced(tensors: Sequence[Tensor], group: Group) -> None:
    """One all-reduce for many small flat tensors."""
    flat = torch.cat(list(tensors))
    all_reduce(flat, group)
    torch._foreach_copy_(list(tensors), list(flat.split([tensor.numel() for tensor in tensors])))
