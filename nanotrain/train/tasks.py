"""Score a task in the layout of the training, without a second copy of the model.

Works for every tp, pp, cp, ep and sharding strategy.

    rows of the task -> samples of S tokens, several rows each -> forward passes
    -> one sum of losses per row

Each row of the task is a group of tokens, whose losses the output layer sums separately
(`parallel/tp/loss.py`). One all-reduce at the end gives every rank the log-likelihoods of all rows.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from nanotrain.comm.collectives import start_all_reduce
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.comm.stop_point import PassStopped
from nanotrain.config.rules.layout import sequence_parts, shortest_sequence
from nanotrain.config.rules.settings import Settings
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
    rules = Settings(plan.config)
    length = row_length(
        task, seq_length, multiple=sequence_parts(rules), shortest=shortest_sequence(rules)
    )
    dataset = TaskDataset(task, seq_length=seq_length, row_length=length)
    sampler = replace(plan.sampler, schedule=None, lengths=Steps(((0, length),)))
    forward = partial(
        run_forward,
        plan.valid_schedule,
        stages,
        pipeline=replace(pipeline, hidden_shape=plan.hidden_shape_of(length)),
    )
    # losses and greedy tokens by row, then by row of padding
    sums = torch.zeros(2, len(task.rows) + 1, dtype=torch.float64, device=context.device)
    try:
        with _summing_rows(stages, sums), GlobalBatchLoader(dataset, sampler=sampler) as batches:
            batch_iterator = build_batch_iterator(batches, context)
            for _ in range(math.ceil(dataset.samples_per_epoch / sampler.global_batch_size)):
                context.heartbeat.begin("validation")
                batch = batch_iterator.next(wants_stop=bool(stop))
                if batch is None:
                    return None
                microbatches = []
                for part in batch.microbatches:
                    numbers = _row_numbers(part, seq_length // length, num_rows=len(task.rows))
                    numbered = replace(part, source_ids=numbers)
                    microbatches.append(BatchContext.of(numbered, cp=context.group("cp")))
                forward(microbatches=microbatches)
    except PassStopped:
        return None
    losses, greedy = start_all_reduce(sums, context.group("world")).wait().tolist()
    return task.score([-loss for loss in losses], greedy)


@contextmanager
def _summing_rows(stages: Mapping[int, RunnableStage], sums: Tensor) -> Iterator[None]:
    """Let the output layer add the losses of each row to `sums` in the block."""
    heads = [getattr(stage.module, "head", None) for stage in stages.values()]
    for head in heads:
        if head is not None:
            head.row_sums = sums
    try:
        yield
    finally:
        for head in heads:
            if head is not None:
                head.row_sums = None


def _row_numbers(batch: Batch, rows_per_sample: int, *, num_rows: int) -> Tensor:
    """The rows of a microbatch by their number in the task; padding has the number `num_rows`."""
    assert batch.sample_ids is not None, "the loader numbers samples"
    sample = batch.sample_ids & ((1 << SEQUENCE_BITS) - 1)
    row_in_sample = batch.sample_ids >> SEQUENCE_BITS
    return (sample * rows_per_sample + row_in_sample).clamp(max=num_rows)
