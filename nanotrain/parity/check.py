"""`nanotrain parity`: compare a layout with one rank, on a shrunk model and local CPU processes.

    shrink.py -> one rank and N ranks (local_ranks.py) train on the same samples -> Record per rank
    -> compare -> ParityReport

    losses, gradient norms    every step
    gradients                 of the first step, after reduction, by global name and box
    weights, router biases    after the last step
    replicas                  weights and buffers that several ranks hold, bit for bit
    samples                   which rank read which, every step

Gradient differences are relative to the largest element of the parameter's gradient on one rank, or
to `NOISE_FLOOR` of the median over parameters where that is larger: a gradient that is zero by
construction (a key bias shifts all scores alike) consists of rounding errors only. Weight
differences are relative to the learning rate.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, repeat
from math import inf
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor, nn

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config
from nanotrain.config.load import Loaded
from nanotrain.config.mup import width_multiplier
from nanotrain.config.rules.check import check_layout, check_model, validate_for_world
from nanotrain.config.schedules import batch_schedule, batch_sizes
from nanotrain.data.batch import Sample
from nanotrain.data.build import DatasetSplits
from nanotrain.parallel.dp.param_buffer import ParamBuffer
from nanotrain.parity.local_ranks import run_local_ranks
from nanotrain.parity.perturbation import Perturbation
from nanotrain.parity.report import ParityReport, StepDifference, TensorDifference, relative
from nanotrain.parity.shrink import left_out, on_one_rank, shrink
from nanotrain.plan.plan import plan_run
from nanotrain.runs.folder import RunFolder
from nanotrain.spec.boxes import TensorBox
from nanotrain.topology.topology import Topology
from nanotrain.train.build import build_run
from nanotrain.train.inputs import with_known_model
from nanotrain.train.run import Run, RunInputs
from nanotrain.train.step import train_step

NOISE_FLOOR = 0.01
Tensors = dict[TensorBox, Tensor]


@dataclass
class Record:
    """The values of one rank.

    Attributes:
        dp: index in the data-parallel group; ranks with equal indices read the same samples.
        losses, grad_norms: loss and gradient norm of every step.
        grads: local shards of the gradients of the first step.
        weights: local boxes of the parameters after the last step.
        main_weights: this rank's part of the main params, which the optimizer updates.
        buffers: buffers with state after the last step, as router biases.
        shards: description of the sharding by parameter.
        reads: numbers of the samples read, per step.
    """

    dp: int
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    grads: Tensors = field(default_factory=dict)
    weights: Tensors = field(default_factory=dict)
    main_weights: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    shards: dict[str, str] = field(default_factory=dict)
    reads: list[list[int]] = field(default_factory=list)


@dataclass
class RandomDataset:
    """Random tokens with a different share of masked tokens in each sample."""

    config: Config
    reads: list[int] = field(default_factory=list)  # samples that were read
    samples_per_epoch: int = 1 << 62

    def __getitem__(self, sample_number: int) -> Sample:
        """A sample that depends on the index and the seed only; records the read."""
        self.reads.append(sample_number)
        data = self.config.data
        length = data.seq_length
        vocab_size = self.config.model.vocab_size or 0
        key = [self.config.train.seed, sample_number]
        rng = np.random.Generator(np.random.Philox(key=key))
        stream = rng.integers(0, vocab_size, length + 1, dtype=np.int64)
        draws = rng.random(length)
        share = 0.25 + 0.75 * rng.random()
        mask = (draws < share).astype(np.float32)
        segments = np.cumsum(rng.random(length) < 4 / length, dtype=np.int32)
        _, starts = np.unique(segments, return_index=True)
        positions = np.arange(length) - starts[segments - segments[0]]
        return Sample(
            tokens=stream[:-1],
            labels=stream[1:],
            loss_mask=mask,
            position_ids=positions if data.reset_position_ids else None,
            segment_ids=segments if data.reset_attention_mask else None,
        )


def check_parity(
    loaded: Loaded, world_size: int, *, num_steps: int, tolerance: float
) -> ParityReport:
    """Train a shrunk form of a configuration on one rank and on N ranks, and compare.

    Args:
        loaded: validated configuration.
        world_size: number of ranks, N, which are processes on this machine.
        num_steps: number of optimizer steps.
        tolerance: largest relative difference of losses that counts as equal; see `ParityReport`.

    Raises:
        TopologyError: the layout does not fit the ranks.
        ConfigError: the model cannot be sharded by the layout.
    """
    small, topology = shrink_checked(loaded, world_size, num_steps=num_steps)
    single = on_one_rank(small)
    single_topology = Topology.of(single.parallel, 1)
    (reference,) = run_local_ranks(single_topology, record_steps, arguments=[single])
    records = run_local_ranks(topology, record_steps, arguments=[small])
    report = compare(reference, records, config=small, tolerance=tolerance)
    config = with_known_model(loaded.config, loaded.explicit)
    return replace(report, left_out=left_out(config))


def shrink_checked(
    loaded: Loaded, world_size: int, *, num_steps: int, keeps_precision: bool = False
) -> tuple[Config, Topology]:
    """The shrunk form of a configuration and the topology of its layout, both valid.

    Raises:
        TopologyError: the layout does not fit the ranks.
        ConfigError: the model cannot be sharded by the layout.
    """
    config = with_known_model(loaded.config, loaded.explicit)
    topology = Topology.of(config.parallel, world_size, has_experts=config.model.moe is not None)
    small = shrink(config, world_size, num_steps=num_steps, keeps_precision=keeps_precision)
    validate_for_world(small, world_size, expected_dp=loaded.data_parallel_size)
    check_model(small)
    check_layout(small)
    return small, topology


def record_steps(
    context: ParallelContext, config: Config, *, perturbation: Perturbation | None = None
) -> Record:
    """Train a shrunk configuration on this rank for `train_iters` steps.

    Args:
        context: context of this rank.
        config: the shrunk configuration.
        perturbation: changes of the inputs of layers; None: as configured.
    """
    record = Record(dp=context.coords["dp"])
    samples = RandomDataset(config)
    with TemporaryDirectory(prefix="nanotrain-parity-") as folder:
        plan = plan_run(config, context.topology.world_size, rank=context.rank)
        inputs = RunInputs(RunFolder(Path(folder)), DatasetSplits(samples, None, None))
        run = build_run(plan, inputs, context=context)
        if perturbation is not None:
            perturbation.attach(run.stages.values())
        try:
            for _ in range(config.train.train_iters):
                _record_step(run, record, samples=samples)
        finally:
            run.batches.close()
    for dp in run.data_parallel:
        (module,) = (stage.module for stage in run.runnable.values() if dp in stage.callbacks)
        record.shards |= _sharding(dp, context)
        with dp.gathered():
            record.weights |= _weights(module, dp)
    for box, tensor in run.optimizer.tensors_to_save("model").items():
        named = replace(box, name=box.name.removeprefix("model/"))
        record.main_weights[named] = tensor.clone()
    for stage in run.stages.values():
        state = stage.state_dict().keys()  # other buffers are statistics of this rank
        for name, buffer in stage.named_buffers():
            if name in state:
                record.buffers[TensorBox.full(name, buffer.shape)] = buffer.clone()
    return record


def compare(
    reference: Record, records: Sequence[Record], *, config: Config, tolerance: float
) -> ParityReport:
    """Compare the records of all ranks of a layout with the record of one rank.

    Args:
        reference: record of one rank.
        records: records of the layout, by rank.
        config: the shrunk configuration.
        tolerance: see `ParityReport`.
    """
    shards: dict[str, str] = {}
    for record in records:
        shards |= record.shards
    largest_grads = _largest(reference.grads)
    floor = NOISE_FLOOR * median(largest_grads.values())
    grad_scales = {name: max(largest, floor) for name, largest in largest_grads.items()}
    lr = max(config.optim.lr, config.optim.decoupled_lr or 0.0)
    if config.optim.optimizer == "sgd":  # vectors move faster in a wider model
        lr *= width_multiplier(config.model)
    weight_scales = {box.name: lr for box in reference.weights}
    buffer_scales = _largest(reference.buffers)
    grads = [record.grads for record in records]
    weights = [record.weights for record in records]
    buffers = [record.buffers for record in records]
    return ParityReport(
        config=config,
        world_size=len(records),
        tolerance=tolerance,
        steps=_compare_steps(reference, records),
        parameters=_differences(reference.grads, grads, scales=grad_scales, shards=shards),
        weights=_differences(reference.weights, weights, scales=weight_scales, shards=shards),
        buffers=_differences(reference.buffers, buffers, scales=buffer_scales, shards=shards),
        unequal_replicas=unequal_replicas(records),
        samples_read_once=are_read_once(records, config),
    )


def _record_step(run: Run, record: Record, *, samples: RandomDataset) -> None:
    """Train a step and add its values to a record."""
    samples.reads.clear()
    batch = run.batch_iterator.next()
    assert batch is not None, "no rank stops early here"
    result = train_step(run, batch)
    if not record.losses:
        record.grads = {box: grad.clone() for box, grad in run.optimizer.grad_tensors().items()}
    record.losses.append(result.loss)
    record.grad_norms.append(result.grad_norm)
    record.reads.append(list(samples.reads))


def _weights(module: nn.Module, dp: ParamBuffer) -> Tensors:
    """Copies of this rank's boxes of the parameters of a stage."""
    named = dict(module.named_parameters())
    return {local.tensor_box: named[name].detach().clone() for name, local in dp.params.items()}


def _sharding(dp: ParamBuffer, context: ParallelContext) -> dict[str, str]:
    """By parameter: sharded dims with their axes, and the number of optimizer state shards."""
    texts = {}
    num_shards = dp.groups.shard.size
    for name, local in dp.params.items():
        sizes = [(shard, context.topology.size(shard.axis)) for shard in local.spec.shards]
        parts = [f"dim {shard.dim} by {shard.axis}={size}" for shard, size in sizes if size > 1]
        parts += [f"shards {num_shards}"] if num_shards > 1 else []
        texts[name] = ", ".join(parts) or "-"
    return texts


def _compare_steps(reference: Record, records: Sequence[Record]) -> tuple[StepDifference, ...]:
    """The difference of each step, by the rank whose loss or norm differs most from one rank."""
    steps = []
    for index, (loss, norm) in enumerate(zip(reference.losses, reference.grad_norms, strict=True)):
        losses = [record.losses[index] for record in records]
        norms = [record.grad_norms[index] for record in records]
        worst_loss = max(losses, key=partial(relative, reference=loss))
        worst_norm = max(norms, key=partial(relative, reference=norm))
        steps.append(StepDifference(index + 1, worst_loss, loss, worst_norm, norm))
    return tuple(steps)


def _largest(tensors: Tensors) -> dict[str, float]:
    """The largest absolute element of each tensor."""
    largest: dict[str, float] = {}
    for box, tensor in tensors.items():
        largest[box.name] = max(largest.get(box.name, 0.0), tensor.abs().max().item())
    return largest


def _differences(
    reference: Tensors,
    local: Sequence[Tensors],
    *,
    scales: Mapping[str, float],
    shards: Mapping[str, str],
) -> tuple[TensorDifference, ...]:
    """Tensor by tensor, relative to `scales`, the largest first.

    Elements that are on no rank differ infinitely.
    """
    rows = []
    for name, differences in largest_differences(reference, local).items():
        absolute = differences.abs().nan_to_num(nan=inf, posinf=inf).max().item()
        scale = scales[name]
        if scale:
            ratio = absolute / scale
        else:
            ratio = inf if absolute else 0.0
        sharding = shards.get(name, "-")
        rows.append(TensorDifference(name, tuple(differences.shape), sharding, absolute, ratio))
    return tuple(sorted(rows, key=lambda row: (-row.relative, row.name)))


def largest_differences(reference: Tensors, local: Sequence[Tensors]) -> dict[str, Tensor]:
    """The largest difference of every element on any rank, with its sign, by name.

    NaN on no rank; infinite where it is not finite.
    """
    expected = global_tensors(reference)
    worst = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
    for tensors in local:
        for box, tensor in tensors.items():
            elements = worst[box.name][box.box.slices()]
            difference = tensor.float() - expected[box.name][box.box.slices()]
            difference = difference.nan_to_num(nan=inf, posinf=inf, neginf=-inf)
            is_smaller = difference.abs() <= elements.abs()  # False beside NaN
            elements.copy_(torch.where(is_smaller, elements, difference))
    return worst


def global_tensors(boxes: Tensors) -> dict[str, Tensor]:
    """The tensors of one rank by name, in fp32."""
    tensors = {box.name: torch.zeros(box.shape) for box in boxes}
    for box, tensor in boxes.items():
        tensors[box.name][box.box.slices()] = tensor.float()
    return tensors


def unequal_replicas(records: Sequence[Record]) -> tuple[str, ...]:
    """Names of weights and buffers of which two ranks hold the same box with different bits."""
    first: Tensors = {}
    unequal = set()
    for record in records:
        for box, tensor in (record.weights | record.buffers).items():
            if not torch.equal(_bits(first.setdefault(box, tensor)), _bits(tensor)):
                unequal.add(box.name)
    return tuple(sorted(unequal))


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: NaN equals NaN, and 0.0 does not equal -0.0."""
    return tensor.contiguous().flatten().view(torch.uint8)


def are_read_once(records: Sequence[Record], config: Config) -> bool:
    """Whether the data-parallel ranks together read every sample of every batch exactly once."""
    # stages in the middle of a pipeline read nothing
    readers = [record for record in records if any(record.reads)]
    by_dp = {record.dp: record.reads for record in readers}
    if any(record.reads != by_dp[record.dp] for record in readers):
        return False
    batches = [sorted(chain(*parts)) for parts in zip(*by_dp.values(), strict=True)]
    schedule = batch_schedule(config)
    sizes: Iterator[int] = repeat(config.train.global_batch_size or 0)
    if schedule is not None:
        sizes = batch_sizes(schedule)
    first = 0
    for batch, size in zip(batches, sizes, strict=False):
        if batch != list(range(first, first + size)):
            return False
        first += size
    return True
