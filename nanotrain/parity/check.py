"""`nanotrain parity`: does a layout train as one rank does? Tried out on a shrunk model and local CPU processes.

    shrink (shrink.py) -> one rank and N ranks train the same samples -> Record of each -> compare -> ParityReport

    losses, gradient norms    of every step
    gradients                 of the first step, reduced and complete, piece by piece by global name
    replicas                  weights after the last step, to the bit
    samples                   numbers read by whom in every step

A relative difference of a gradient is its largest absolute one over the largest element of the parameter's gradient
on one rank, or over `NOISE_FLOOR` of what is typical among the parameters where that is larger: a gradient that is zero
by construction (a key bias shifts all scores alike) is made of roundings only and has no digits to compare.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from math import inf
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from nanotrain.comm.local_world import run_ranks
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config
from nanotrain.config.layout_rules import check_layout
from nanotrain.config.load import Loaded
from nanotrain.config.model_rules import check_model
from nanotrain.config.validate import validate_for_world
from nanotrain.data.batch import Sample
from nanotrain.data.build import DatasetSplits
from nanotrain.parallel.dp.data_parallel import DataParallel
from nanotrain.parity.report import ParamDifference, ParityReport, StepDifference, relative
from nanotrain.parity.shrink import on_one_rank, shrink
from nanotrain.runs.folder import RunFolder
from nanotrain.topology.boxes import TensorBox
from nanotrain.topology.topology import Topology
from nanotrain.train.build import build_run
from nanotrain.train.inputs import RunInputs, with_pretrained_model
from nanotrain.train.plan import plan_run
from nanotrain.train.run import Run
from nanotrain.train.step import train_step

NOISE_FLOOR = 0.01


@dataclass
class Record:
    """What one rank saw and held.

    Attributes:
        dp: which of the data-parallel ranks it is; ranks of the same number read the same samples.
        grads: its pieces of the first step's gradients.
        weights: digests of its pieces of the weights after the last step.
        cuts: how the layout cuts each parameter, as text.
        reads: the numbers of the samples it read, by step.
    """

    dp: int
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    grads: dict[TensorBox, Tensor] = field(default_factory=dict)
    weights: dict[TensorBox, bytes] = field(default_factory=dict)
    shards: dict[str, str] = field(default_factory=dict)
    reads: list[list[int]] = field(default_factory=list)


@dataclass
class TrialDataset:
    """Random tokens in which every sample masks another share; remembers which samples were asked for.

    Args:
        config: a shrunk configuration; says how long samples are and whether documents matter.
    """

    config: Config
    asked: list[int] = field(default_factory=list)
    samples_per_epoch: int = 1 << 62

    def __getitem__(self, sample_number: int) -> Sample:
        """The sample of that number, and a note that it was read."""
        self.asked.append(sample_number)
        data, length = self.config.data, self.config.data.seq_length
        draw = np.random.Generator(np.random.Philox(key=[self.config.train.seed, sample_number]))
        stream = draw.integers(0, self.config.model.vocab_size or 0, length + 1, dtype=np.int64)
        mask = (draw.random(length) < 0.25 + 0.75 * draw.random()).astype(np.float32)
        documents = np.cumsum(draw.random(length) < 4 / length, dtype=np.int32)
        _, starts = np.unique(documents, return_index=True)
        positions = np.arange(length) - starts[documents - documents[0]]
        return Sample(
            tokens=stream[:-1],
            labels=stream[1:],
            loss_mask=mask,
            position_ids=positions if data.reset_position_ids else None,
            segment_ids=documents if data.reset_attention_mask else None,
        )


def check_parity(loaded: Loaded, world_size: int, *, num_steps: int, tolerance: float) -> ParityReport:
    """Train a shrunk form of a configuration on one rank and on N, and compare.

    Args:
        loaded: a validated configuration.
        world_size: N, processes to start on this machine.
        num_steps: optimizer steps.
        tolerance: largest relative difference that counts as equal; of gradients ten times that.

    Raises:
        TopologyError: the layout does not fit the ranks.
        ConfigError: the model cannot be cut as asked.
    """
    config = loaded.config
    topology = Topology.of(config.parallel, world_size)
    if config.checkpoint.pretrained_checkpoint:
        config = with_pretrained_model(config, loaded.explicit)
        check_model(config)
        check_layout(config)
    small = shrink(config, world_size, num_steps=num_steps)
    validate_for_world(small, world_size, expected_dp=loaded.data_parallel_size)
    check_model(small)
    check_layout(small)
    alone = on_one_rank(small)
    (reference,) = run_ranks(Topology.of(alone.parallel, 1), record_steps, arguments=[alone])
    records = run_ranks(topology, record_steps, arguments=[small])
    return compare(reference, records, config=small, tolerance=tolerance)


def record_steps(context: ParallelContext, config: Config) -> Record:
    """Train a shrunk configuration on this rank.

    Args:
        context: this rank's groups.
        config: what to train, for `train_iters` steps.
    """
    record, samples = Record(dp=context.coords["dp"]), TrialDataset(config)
    with TemporaryDirectory(prefix="nanotrain-parity-") as folder:
        plan = plan_run(config, context.topology.world_size, rank=context.rank)
        inputs = RunInputs(RunFolder(Path(folder)), DatasetSplits(samples, None, None))
        run = build_run(plan, inputs, context=context)
        try:
            for _ in range(config.train.train_iters):
                _record_step(run, record, samples=samples)
        finally:
            run.batches.close()
    for layer in run.data_parallel:
        layer.finish_param_gather()
        record.shards |= _cuts(layer, context)
    record.weights = _digests(run)
    return record


def compare(reference: Record, records: Sequence[Record], *, config: Config, tolerance: float) -> ParityReport:
    """Hold what the ranks of a layout recorded against one rank's record.

    Args:
        reference: of one rank.
        records: of every rank of the layout.
        config: what was trained.
        tolerance: largest relative difference that counts as equal; of gradients ten times that.
    """
    shards = {name: cut for record in records for name, cut in record.shards.items()}
    return ParityReport(
        config=config,
        world_size=len(records),
        tolerance=tolerance,
        steps=_compare_steps(reference, records),
        parameters=_compare_grads(reference, records, shards=shards),
        unequal_replicas=_unequal_replicas(records),
        samples_read_once=_are_read_once(records, config.train.global_batch_size or 0),
    )


def _record_step(run: Run, record: Record, *, samples: TrialDataset) -> None:
    samples.asked.clear()
    batch = run.batch_iterator.next()
    assert batch is not None, "nobody asked to stop"
    result = train_step(run, batch)
    if not record.losses:
        record.grads = {box: grad.clone() for box, grad in run.optimizer.held_grads().items()}
    record.losses.append(result.loss)
    record.grad_norms.append(result.grad_norm)
    record.reads.append(list(samples.asked))


def _digests(run: Run) -> dict[TensorBox, bytes]:
    """The bytes of what this rank holds of each weight, in short."""
    weights = {name: weight for stage in run.stages.values() for name, weight in stage.named_parameters()}
    held = {name: local for layer in run.data_parallel for name, local in layer.params.items()}
    return {
        TensorBox(name, local.spec.shape, local.box): sha256(weights[name].detach().numpy().tobytes()).digest()
        for name, local in held.items()
    }


def _cuts(layer: DataParallel, context: ParallelContext) -> dict[str, str]:
    """Which dims of a parameter are cut among how many ranks, and among how many its optimizer state is."""
    texts = {}
    num_shards = layer.groups.shard.size
    for name, local in layer.params.items():
        sizes = [(cut, context.topology.size(cut.axis)) for cut in local.spec.shards]
        parts = [f"dim {cut.dim} by {cut.axis}={size}" for cut, size in sizes if size > 1]
        parts += [f"shards {num_shards}"] if num_shards > 1 else []
        texts[name] = ", ".join(parts) or "-"
    return texts


def _compare_steps(reference: Record, records: Sequence[Record]) -> tuple[StepDifference, ...]:
    """Step by step; of the ranks, which should all say the same, the one that is furthest off."""
    steps = []
    for index, (loss, norm) in enumerate(zip(reference.losses, reference.grad_norms, strict=True)):
        steps.append(
            StepDifference(
                step=index + 1,
                loss=max((record.losses[index] for record in records), key=lambda value: relative(value, loss)),
                loss_on_one_rank=loss,
                grad_norm=max(
                    (record.grad_norms[index] for record in records), key=lambda value: relative(value, norm)
                ),
                grad_norm_on_one_rank=norm,
            )
        )
    return tuple(steps)


def _compare_grads(
    reference: Record, records: Sequence[Record], *, shards: Mapping[str, str]
) -> tuple[ParamDifference, ...]:
    """Parameter by parameter, worst first."""
    whole = {box.name: torch.zeros(box.shape) for box in reference.grads}
    for box, grad in reference.grads.items():
        whole[box.name][box.box.slices()] = grad
    # What the ranks' pieces say of every element; nan where none of them says anything.
    worst = {name: torch.full_like(grad, torch.nan) for name, grad in whole.items()}
    for record in records:
        for box, grad in record.grads.items():
            place = worst[box.name][box.box.slices()]
            difference = (grad - whole[box.name][box.box.slices()]).abs().nan_to_num(nan=inf, posinf=inf)
            place.copy_(torch.fmax(place, difference))
    largest = {name: grad.abs().max().item() for name, grad in whole.items()}
    floor = NOISE_FLOOR * median(largest.values())
    rows = []
    for name, differences in worst.items():
        absolute = differences.nan_to_num(nan=inf, posinf=inf).max().item()
        scale = max(largest[name], floor)
        rows.append(
            ParamDifference(
                name=name,
                shape=tuple(differences.shape),
                cut=shards.get(name, "-"),
                absolute=absolute,
                relative=absolute / scale if scale else (inf if absolute else 0.0),
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.relative, row.name)))


def _unequal_replicas(records: Sequence[Record]) -> tuple[str, ...]:
    """Names of parameters of which two ranks hold the same piece with different bits."""
    first: dict[TensorBox, bytes] = {}
    unequal = set()
    for record in records:
        for box, digest in record.weights.items():
            if first.setdefault(box, digest) != digest:
                unequal.add(box.name)
    return tuple(sorted(unequal))


def _are_read_once(records: Sequence[Record], global_batch_size: int) -> bool:
    """Whether in every step the data-parallel ranks together read every sample of the global batch, each once."""
    by_dp = {record.dp: record.reads for record in records}
    if any(record.reads != by_dp[record.dp] for record in records):
        return False
    for step in range(len(records[0].reads)):
        read = sorted(number for reads in by_dp.values() for number in reads[step])
        if read != list(range(step * global_batch_size, (step + 1) * global_batch_size)):
            return False
    return True
