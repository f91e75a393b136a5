"""Score a task in the layout of the training: no second copy of the model, any tp, pp, cp, ep and
sharding strategy.

    rows of the task -> samples of S tokens, several rows each -> forward passes -> one sum of
    losses per row

Each row of the task is a group of tokens, whose losses the output layer sums separately
(`parallel/tp/loss.py`). One all-reduce at the end gives every rank the log-likelihoods of all rows.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from nanotrain.comm.collectives import start_all_reduce
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.comm.stop_point import PassStopped
from nanotrain.config.schedules import Steps
from nanotrain.data.batch import SEQUENCE_BITS, Batch
from nanotrain.data.loader import GlobalBatchLoader
from nanotrain.data.tasks import Task, TaskDataset, TaskScore, row_length
from nanotrain.model.context import BatchContext
from nanotrain.parallel.pp.executor import Pipeline, RunnableStage, run_forward
from nanotrain.plan.plan import Plan
from nanotrain.train.build import build_batch_iterator
from nanotrain.train.run import StopRequest


@torch.no_grad()
def score_task(
    task: Task,
    *,
    plan: Plan,
    stages: Mapping[int, RunnableStage],
    pipeline: Pipeline,
    context: ParallelContext,
    stop: StopRequest | None = None,
) -> TaskScore | None:
    """Score a task; every rank calls this and gets the same score.

    Args:
        task: the questions and their rows.
        plan: plan of this rank.
        stages: stages of this rank, with their weights.
        pipeline: the pp group, and the shape of the hidden states of a sample.
        context: device and groups.
        stop: signals of this rank; None if they are not handled.

    Returns:
        The score; None if a rank received a signal.
    """
    seq_length = plan.config.data.seq_length
    length = row_length(task, seq_length, multiple=2 * plan.num_sequence_shards)
    dataset, parts = (
        TaskDataset(task, seq_length=seq_length, row_length=length),
        seq_length // length,
    )
    sampler = replace(plan.sampler, schedule=None, lengths=Steps(((0, length),)))
    pipeline = replace(pipeline, hidden_shape=plan.hidden_shape_of(length))
    # the last one of padding
    sums = torch.zeros(2, len(task.rows) + 1, dtype=torch.float64, device=context.device)
    heads = [
        head
        for stage in stages.values()
        if (head := getattr(stage.module, "head", None)) is not None
    ]
    for head in heads:
        head.row_sums = sums
    try:
        with GlobalBatchLoader(dataset, sampler=sampler) as batches:
            batch_iterator = build_batch_iterator(batches, context)
            for _ in range(-(-dataset.samples_per_epoch // sampler.global_batch_size)):
                context.heartbeat.begin("validation")
                batch = batch_iterator.next(wants_stop=bool(stop))
                if batch is None:
                    return None
                rows = [
                    _with_row_numbers(part, parts=parts, num_rows=len(task.rows))
                    for part in batch.microbatches
                ]
                contexts = [BatchContext.of(part, cp=context.group("cp")) for part in rows]
                run_forward(plan.valid_schedule, stages, microbatches=contexts, pipeline=pipeline)
    except PassStopped:
        return None
    finally:
        for head in heads:
            head.row_sums = None
    losses, greedy = start_all_reduce(sums, context.group("world")).wait().tolist()
    return task.score([-loss for loss in losses], greedy)


def _with_row_numbers(batch: Batch, *, parts: int, num_rows: int) -> Batch:
    """A microbatch whose source ids are the numbers of its rows in the task."""
    assert batch.sample_ids is not None, "the loader numbers samples"
    sample, part = batch.sample_ids & ((1 << SEQUENCE_BITS) - 1), batch.sample_ids >> SEQUENCE_BITS
    numbers: Tensor = (sample * parts + part).clamp(max=num_rows)
    return replace(batch, source_ids=numbers)
