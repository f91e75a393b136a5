"""One rank of a run that `nanotrain card` measures.

measure_rank   train, save or resume a shrunk configuration on this rank
Measured       its losses, and its bytes by plan and measured
"""

from dataclasses import dataclass
from pathlib import Path

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config
from nanotrain.config.schema import to_dict
from nanotrain.data.batch import Sample
from nanotrain.data.build import DatasetSplits
from nanotrain.parallel.dp.bucket import Bucket
from nanotrain.parity.check import RandomDataset
from nanotrain.plan.plan import plan_run
from nanotrain.plan.traffic import sent_bytes
from nanotrain.runs.folder import RunFolder
from nanotrain.train.build import build_run
from nanotrain.train.run import Run, RunInputs
from nanotrain.train.step import train_step

NUM_REPEATED = 8  # samples of a run on samples that repeat
DP_GROUPS = ("dp_shard", "dp_replicate", "expert_dp_shard", "expert_dp_replicate")
OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")


@dataclass(frozen=True)
class Measured:
    """One rank of a run.

    Attributes:
        losses: loss of every step.
        planned, measured: bytes of parameters, gradients and optimizer state, and bytes that data
            parallelism sends in a step.
    """

    losses: list[float]
    planned: tuple[int, int]
    measured: tuple[int, int]


class RepeatedDataset(RandomDataset):
    """The first samples, again and again."""

    def __getitem__(self, sample_number: int) -> Sample:
        """A sample of the first few."""
        return super().__getitem__(sample_number % NUM_REPEATED)


def measure_rank(
    context: ParallelContext,
    config: Config,
    *,
    folder: Path,
    saves_at: int = 0,
    resumes: int = 0,
    repeats: bool = False,
) -> Measured:
    """Train a shrunk configuration on this rank for `train_iters` steps.

    Args:
        context: this rank.
        config: the configuration.
        folder: run folder for checkpoints.
        saves_at: step after which a checkpoint is written; 0 for none.
        resumes: step of the checkpoint that the run starts from; 0 for none.
        repeats: whether the samples repeat.
    """
    samples = RepeatedDataset(config) if repeats else RandomDataset(config)
    run_folder = RunFolder(folder)
    checkpoint = run_folder.checkpoints / f"step-{resumes:08d}" if resumes else None
    inputs = RunInputs(
        run_folder,
        DatasetSplits(samples, None, None),
        checkpoint=checkpoint,
        is_resumed=checkpoint is not None,
    )
    plan = plan_run(config, context.topology.world_size, rank=context.rank)
    run = build_run(plan, inputs, context=context)
    resident = _resident_bytes(run)
    planned = run.plan.resident_bytes
    sent = 0
    losses = []
    try:
        for step in range(resumes + 1, config.train.train_iters + 1):
            context.traffic.reset()
            losses.append(_train_step(run))
            sent = _sent_bytes(run, context)
            if step == saves_at:
                _save(run)
    finally:
        run.batches.close()
    traffic = sent_bytes(run.plan).items()
    planned_sent = sum(count for (group, _), count in traffic if group in DP_GROUPS)
    planned_resident = planned.total - planned.grad_buckets - planned.units
    return Measured(losses, (planned_resident, planned_sent), (resident, sent))


def _train_step(run: Run) -> float:
    """Take a step; returns its loss."""
    batch = run.batch_iterator.next()
    assert batch is not None, "no rank stops early here"
    return train_step(run, batch).loss


def _sent_bytes(run: Run, context: ParallelContext) -> int:
    """Bytes that data parallelism has sent since the start of the step."""
    for data_parallel in run.data_parallel:
        data_parallel.wait_for_params()
    total = 0
    for group in DP_GROUPS:
        total += sum(context.traffic.bytes(group, op) for op in OPS)
    return total


def _resident_bytes(run: Run) -> int:
    """Bytes allocated for parameters, gradients and optimizer state between steps."""
    tensors = list(run.optimizer.allocated_tensors)
    for data_parallel in run.data_parallel:
        for bucket in data_parallel.buckets:
            tensors += [bucket.params.full, bucket.params.shard]
            if isinstance(bucket, Bucket):  # others are frozen
                tensors += [bucket.grads.shard, bucket.grads.main]
    storages = [tensor.untyped_storage() for tensor in tensors]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(sizes.values())


def _save(run: Run) -> None:
    """Write a checkpoint of the last step."""
    run.checkpointer.save(
        run.state.step,
        run.optimizer.tensors_to_save() | run.parts.tensors_to_save(),
        objects={"train": run.state.to_dict(), "optimizer": run.optimizer.state_dict()},
        config=to_dict(run.config),
        topology={},
    )
