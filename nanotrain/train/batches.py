"""Global batches, with the counts that all ranks agree on before every step.

Before each step one small all-reduce carries the target tokens of every rank's microbatches (the
loss is divided by the global count), whether a rank requests a stop or a save, and whether its data
failed. So all ranks enter a step or none does, and an error on one rank is raised on all of them.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch

from nanotrain.comm.collectives import all_gather_object, start_all_reduce_scalars
from nanotrain.comm.group import Group
from nanotrain.comm.work import Work
from nanotrain.data.batch import Batch
from nanotrain.errors import NanotrainError
from nanotrain.optim.lr import LRSchedule
from nanotrain.plan.plan import Plan


@dataclass(frozen=True)
class StepSettings:
    """Settings of a step that are functions of the samples consumed before it."""

    num_samples: int = 0  # samples of the global batch
    num_sequences: int = 0  # sequences of the global batch; more where samples are split
    seq_length: int = 0  # tokens per sequence
    hidden_shape: tuple[int, ...] = ()  # [B, S, H] of this rank's hidden states between two stages
    # arguments of `DistributedOptimizer.step`
    rates: Mapping[str, Any] = field(default_factory=dict)
    dropout_seed: int | None = None  # None: nothing is dropped

    @classmethod
    def at(cls, consumed_samples: int, *, plan: Plan, lr_schedule: LRSchedule) -> Self:
        """The settings of the step whose batch starts at `consumed_samples`."""
        config = plan.config
        num_samples = plan.sampler.size_at(consumed_samples)
        seq_length = plan.sampler.length_at(consumed_samples) or config.data.seq_length
        rates = {
            "lr": lr_schedule.lr_at(consumed_samples),
            "decoupled_lr": lr_schedule.decoupled_lr_at(consumed_samples),
            "weight_decay": lr_schedule.weight_decay_at(consumed_samples),
        }
        return cls(
            num_samples=num_samples,
            num_sequences=num_samples * (config.data.seq_length // seq_length),
            seq_length=seq_length,
            hidden_shape=plan.hidden_shape_of(seq_length),
            rates=rates,
            dropout_seed=config.train.seed if config.model.has_dropout else None,
        )


@dataclass(frozen=True)
class GlobalBatch:
    """One rank's part of a global batch."""

    microbatches: tuple[Batch, ...]  # microbatches of this rank, on its device
    num_target_tokens: int  # unmasked target tokens of the global batch, over all ranks
    wait_s: float  # seconds that this rank waited for data
    # settings of the step on this batch; the defaults in evaluation
    settings: StepSettings = StepSettings()
    wants_save: bool = False  # whether a rank requested a save before this batch
    counts: tuple[float, ...] = ()  # numbers that `BatchOptions.counts` returns, over all ranks
    # seconds of the previous step without waiting for other ranks, by rank
    busy_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class _Vote:
    """A batch that this rank has read, and the all-reduce of its counts and requests."""

    microbatches: list[Batch]
    sums: Work[list[float]]
    num_counts: int
    failure: NanotrainError | None  # error of this rank
    wait_s: float
    settings: StepSettings


@dataclass(frozen=True)
class BatchOptions:
    """Options of reading global batches on one rank."""

    readers_per_sample: int = 1  # ranks that read the same sample, so that it is counted once
    # the sequence shard of this rank under context parallelism
    split: Callable[[Batch], Batch] = lambda batch: batch
    is_ahead: bool = False  # whether to vote one step ahead
    # changes a microbatch on the host as it is read
    prepare: Callable[[Batch], Batch] = lambda batch: batch
    # further numbers to sum over samples
    counts: Callable[[Sequence[Batch]], list[float]] = lambda batches: []
    settings: Callable[[], StepSettings] = StepSettings  # settings of the batch that is read next


class BatchIterator:
    """Iterator over the global batches of this rank.

    With `is_ahead` the batch after the returned one is read, and its vote started, before the batch
    is returned: on a GPU its result is on the host before the device has finished the step, so the
    host never waits for other ranks. A stop, a request to save or a failure then takes effect one
    step later.

    Args:
        batches: this rank's microbatches per global batch.
        group: group of all ranks, for the numbers; on the backend of the device.
        control: group of all ranks, for errors.
        device: device of the microbatches.
        options: reading of batches.
    """

    def __init__(
        self,
        batches: Iterator[list[Batch]],
        group: Group,
        *,
        control: Group,
        device: torch.device,
        options: BatchOptions | None = None,
    ) -> None:
        self._batches = batches
        self._group = group
        self._control = control
        self._device = device
        self._options = options or BatchOptions()
        self._started: _Vote | None = None  # on the batch that was read ahead

    def next(
        self,
        *,
        wants_stop: bool = False,
        wants_save: bool = False,
        failure: NanotrainError | None = None,
        busy_s: float | None = None,
    ) -> GlobalBatch | None:
        """The next global batch; None if any rank requests a stop.

        Args:
            wants_stop: whether this rank received a signal or reached its time limit.
            wants_save: whether this rank received a request to save and continue.
            failure: an error of this rank since the last step.
            busy_s: seconds of the last step in which this rank did not wait for others; None on
                every rank if unknown.

        Raises:
            NanotrainError: some rank or its data failed; the same error on every rank.
        """
        start = partial(
            self._start,
            wants_stop=wants_stop,
            wants_save=wants_save,
            failure=failure,
            busy_s=busy_s,
        )
        vote = self._started or start()
        num_tokens, num_failures, num_stops, num_saves, *others = vote.sums.wait()
        if num_failures:
            raise_on_all(vote.failure, self._control)
        if num_stops:
            return None
        local = tuple(self._options.split(batch.to(self._device)) for batch in vote.microbatches)
        if self._options.is_ahead:
            self._started = start()
        return GlobalBatch(
            microbatches=local,
            num_target_tokens=round(num_tokens),
            wait_s=vote.wait_s,
            settings=vote.settings,
            wants_save=num_saves > 0,
            counts=tuple(others[: vote.num_counts]),
            busy_s=tuple(others[vote.num_counts :]),
        )

    def discard(self) -> None:
        """Drop the batch that was read ahead, if any; the next call reads a new one. Collective."""
        if self._started is not None:
            self._started.sums.wait()
        self._started = None

    def _start(
        self,
        *,
        wants_stop: bool,
        wants_save: bool,
        failure: NanotrainError | None,
        busy_s: float | None,
    ) -> _Vote:
        """Read a batch and start the vote on it."""
        options = self._options
        microbatches: list[Batch] = []
        start = time.perf_counter()
        settings = options.settings()
        try:
            microbatches = [options.prepare(batch) for batch in next(self._batches)]
        except NanotrainError as error:
            failure = failure or error
        wait_s = time.perf_counter() - start
        num_tokens = sum(float(batch.num_target_tokens) for batch in microbatches)
        counts = [count / options.readers_per_sample for count in options.counts(microbatches)]
        busy_by_rank: list[float] = []
        if busy_s is not None:
            busy_by_rank = [0.0] * self._group.size
            busy_by_rank[self._group.index] = busy_s
        numbers = [
            num_tokens / options.readers_per_sample,
            float(failure is not None),
            float(wants_stop),
            float(wants_save),
            *counts,
            *busy_by_rank,
        ]
        sums = start_all_reduce_scalars(numbers, self._group)
        return _Vote(microbatches, sums, len(counts), failure, wait_s, settings)


def raise_on_all(failure: NanotrainError | None, group: Group) -> None:
    """Raise the first error of the ranks on every rank; return if there is none.

    Args:
        failure: error of this rank; None for none.
        group: group of all ranks.

    Raises:
        NanotrainError: the same on every rank.
    """
    for error in all_gather_object(failure, group):
        if error is not None:
            raise error
