"""Microbatches of one rank, loaded in this process or by worker processes.

    all_microbatches    indices of the samples of every microbatch
    _BatchReader        indices -> Batch, in this process or in a worker
    GlobalBatchLoader   the microbatches of every step

A batch depends only on its sample indices. So a resume starts from another `consumed_samples`, and
the number of workers changes time, never values.

Workers are started by a fork server, not by `fork`: the trainer has gloo, OpenMP and CUDA threads,
and a forked copy of a held lock hangs. The server imports torch once (1.3 s, in parallel with the
trainer's own start) and all loaders of a process share it. SIGINT, SIGTERM and SIGUSR1 are blocked
while processes start, and workers inherit that mask: a signal reaches the whole process group, but
only the trainer may handle it.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from multiprocessing import resource_tracker
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from nanotrain.data.batch import Batch, Sample, SampleDataset, collate, split_sequences
from nanotrain.data.blend import BlendedDataset
from nanotrain.data.build import corpora_of
from nanotrain.data.sampler import SamplerConfig, all_microbatches
from nanotrain.data.worker import WorkerContext, exit_with_parent
from nanotrain.errors import EnvironmentFault, LocalFault, NanotrainError
from nanotrain.runs.files import free_space

_INTERRUPTS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1})
# Microbatches per worker: at least double buffering, at most what keeps /dev/shm small.
_MIN_PREFETCH, _MAX_PREFETCH = 2, 16
_STEPS_AHEAD, _THREADS_AHEAD = 2, 16  # to read samples in object storage
_END_S = 0.2  # wait for the exit code of a worker that cannot be reached
# words in the RuntimeErrors that torch raises when a worker died or cannot be reached
_WORKER_ERRORS = ("DataLoader worker", "Communication with the workers")


class _ReadAhead:
    """Reads the samples of the next steps on threads, in the order in which they will be needed.

    Chunks of remote files are then in the host's cache. Errors are raised where a sample is needed.

    Args:
        dataset: the samples.
        sampler: data-parallel index and batch sizes.
        consumed_samples: number of samples that were read before.
        skipped_samples: added to every index.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        *,
        sampler: SamplerConfig,
        consumed_samples: int,
        skipped_samples: int,
    ) -> None:
        batches = all_microbatches(sampler, consumed_samples)
        indices = chain.from_iterable(batches)
        self._coming = (index + skipped_samples for index in indices if index >= 0)
        self._next = next(self._coming)
        self._distance = _STEPS_AHEAD * sampler.global_batch_size
        self._queue = SimpleQueue[int | None]()
        for _ in range(_THREADS_AHEAD):
            Thread(target=_read_all, args=(dataset, self._queue), daemon=True).start()

    def advance(self, position: int) -> None:
        """Read the samples after `position`, which is needed now, up to some steps later."""
        while self._next <= position + self._distance:
            if self._next > position:
                self._queue.put(self._next)
            self._next = next(self._coming)

    def __del__(self) -> None:
        for _ in range(_THREADS_AHEAD):
            self._queue.put(None)


def _read_all(dataset: SampleDataset, queue: "SimpleQueue[int | None]") -> None:
    while (position := queue.get()) is not None:
        with suppress(NanotrainError):  # raised again where the sample is needed
            dataset[position]


class _BatchReader(Dataset[Any]):
    """Reads microbatches; arguments as of `_ReadAhead`."""

    def __init__(
        self,
        dataset: SampleDataset,
        *,
        sampler: SamplerConfig,
        consumed_samples: int,
        skipped_samples: int,
    ) -> None:
        self.dataset = dataset
        self.skipped_samples = skipped_samples
        self.unread_length = sampler.unread_length
        self._read_ahead: Callable[[], _ReadAhead] | None = None
        is_remote = any(part.corpus.is_remote for part in corpora_of(dataset))
        if is_remote and self.unread_length is None:
            self._read_ahead = partial(
                _ReadAhead,
                dataset,
                sampler=sampler,
                consumed_samples=consumed_samples,
                skipped_samples=skipped_samples,
            )

    @cached_property
    def _ahead(self) -> _ReadAhead | None:
        """The reader ahead of the first worker; None in other workers, which read the cache."""
        worker = get_worker_info()
        is_first = worker is None or worker.id == 0
        if self._read_ahead is None or not is_first:
            return None
        return self._read_ahead()

    def __getitems__(self, indices: Sequence[int]) -> Batch | NanotrainError:
        """Read one microbatch by sample indices; errors are returned for the loader to raise."""
        samples = [max(index, ~index) for index in indices]  # padding is a negative index
        positions = [sample + self.skipped_samples for sample in samples]
        if self._ahead is not None:
            self._ahead.advance(max(positions))
        try:
            rows = [self._read_sample(*pair) for pair in zip(positions, indices, strict=True)]
            sources = None
            if isinstance(self.dataset, BlendedDataset):
                sources = torch.tensor([self.dataset.locate(position)[0] for position in positions])
            # padding has the dropout of the sample that it repeats, so QK-clip gets no other logits
            batch = replace(
                collate(rows),
                sample_ids=torch.tensor(samples),
                source_ids=sources,
                is_padding=max(indices) < 0,
            )
        except NanotrainError as error:
            # returned, not raised: torch would put the worker's traceback into the message
            return error
        return batch if get_worker_info() is None else _share(batch)

    def _read_sample(self, position: int, index: int) -> Sample:
        """A sample of the dataset; a negative index gives padding without target tokens."""
        if self.unread_length is not None:
            zeros = np.zeros(self.unread_length, dtype=np.int64)
            return Sample(zeros, zeros, loss_mask=zeros.astype(np.float32))
        sample = self.dataset[position]
        if index < 0:
            return replace(sample, loss_mask=np.zeros_like(sample.loss_mask))
        return sample


def _share(batch: Batch) -> Batch | NanotrainError:
    """Move a worker's batch to shared memory.

    This is done here, not in the queue's own thread, which would only print the error and let the
    trainer wait forever.
    """
    try:
        return batch.share_memory()
    except (RuntimeError, OSError) as error:
        return EnvironmentFault(
            "a data worker found no shared memory for a batch",
            why=f"{str(error).splitlines()[0]}; {free_space(Path('/dev/shm'))}",
            fix="enlarge /dev/shm (docker run --shm-size), or set --num-workers 0",
        )


class GlobalBatchLoader(AbstractContextManager["GlobalBatchLoader"]):
    """An endless iterator over global batches, as lists of this rank's microbatches.

    Args:
        dataset: the samples.
        sampler: this rank's data-parallel index and the batch sizes.
        consumed_samples: samples that all ranks together have read before; the index to resume
            from.
        skipped_samples: samples left out before; added to every index.
        num_workers: processes that load ahead; 0 loads in this process, as where the rank needs no
            tokens.
        pin_memory: put batches into page-locked memory, for asynchronous copies to a GPU.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        *,
        sampler: SamplerConfig,
        consumed_samples: int = 0,
        skipped_samples: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.num_workers = num_workers if sampler.unread_length is None else 0
        self.pin_memory = pin_memory
        self._microbatches: Iterator[Batch | NanotrainError] | None = None
        self.restart(consumed_samples=consumed_samples, skipped_samples=skipped_samples)

    def restart(self, *, consumed_samples: int, skipped_samples: int) -> None:
        """Continue from another sample; arguments as for the class.

        Raises:
            LocalFault: this machine has no shared memory, processes or open files left for the
                workers.
        """
        self.close()
        self.consumed_samples = consumed_samples
        reader = _BatchReader(
            self.dataset,
            sampler=self.sampler,
            consumed_samples=consumed_samples,
            skipped_samples=skipped_samples,
        )
        loader = partial(
            DataLoader,
            reader,
            batch_sampler=all_microbatches(self.sampler, consumed_samples),
            collate_fn=_identity,
            pin_memory=self.pin_memory,
        )
        if self.num_workers:
            self._microbatches = self._start_workers(loader)
        else:
            self._microbatches = iter(loader())

    def _start_workers(
        self, loader: "Callable[..., DataLoader[Any]]"
    ) -> Iterator[Batch | NanotrainError]:
        """Start the worker processes of a loader."""
        context = WorkerContext(preload=["torch", "nanotrain.data.loader"])
        self._context = context
        prefetch = -(-2 * self.sampler.num_microbatches // self.num_workers)
        try:
            # raises before torch's iterator is half made, whose end prints a traceback
            context.Semaphore()
            with _blocking_interrupts():
                return iter(
                    loader(
                        worker_init_fn=_start_worker,
                        num_workers=self.num_workers,
                        multiprocessing_context=context,
                        prefetch_factor=min(max(prefetch, _MIN_PREFETCH), _MAX_PREFETCH),
                    )
                )
        except OSError as error:  # the semaphores of its queues are files in /dev/shm
            raise LocalFault(
                f"{self.num_workers} data workers could not be started",
                why=f"{error.strerror or error}; {free_space(Path('/dev/shm'))}",
                fix=(
                    "enlarge /dev/shm (docker run --shm-size), raise ulimit -n, "
                    "or set --num-workers 0"
                ),
            ) from None

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        """The microbatches of the next global batch, in order.

        Samples are split where sequences are shorter.

        Raises:
            DataError: a sample that cannot be used.
            EnvironmentFault: a worker process died.
        """
        sampler = self.sampler
        consumed = self.consumed_samples
        count = sampler.num_microbatches_at(consumed)
        length = sampler.length_at(consumed)
        microbatches = [split_sequences(self._next_microbatch(), length) for _ in range(count)]
        self.consumed_samples += sampler.size_at(consumed)
        return microbatches

    def close(self) -> None:
        """Stop the worker processes; further calls do nothing."""
        microbatches, self._microbatches = self._microbatches, None
        shutdown = getattr(microbatches, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _next_microbatch(self) -> Batch:
        """The next microbatch from the workers; raises the error of a worker."""
        assert self._microbatches is not None, "the loader is closed"
        try:
            batch = next(self._microbatches)
        except (RuntimeError, OSError, EOFError) as error:
            if self.num_workers and _is_worker_error(error):
                raise self._worker_fault(error) from None
            raise
        if isinstance(batch, NanotrainError):
            raise batch
        return batch

    def _worker_fault(self, error: Exception) -> EnvironmentFault:
        """The error for a worker that died or cannot be reached."""
        for process in self._context.started:
            process.join(_END_S)  # it may be about to end
        why = self._context.how_ended()
        if not why:
            reason = str(error) or type(error).__name__
            why = f"{reason}; usually memory, /dev/shm or ulimit -n is exhausted"
        return EnvironmentFault(
            "a data worker process died or cannot be reached",
            why=why,
            fix="lower --num-workers, or set --num-workers 0 to load in the training process",
        )


def _is_worker_error(error: Exception) -> bool:
    """Whether a worker died: torch's RuntimeError, or the end of its socket."""
    if not isinstance(error, RuntimeError):
        return True
    return any(words in str(error) for words in _WORKER_ERRORS)


def _identity(batch: Any) -> Any:
    return batch


def _start_worker(worker: int) -> None:
    exit_with_parent()
    # For the whole process: its other threads have the mask only if the fork server was started
    # with it.
    for number in _INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def _blocking_interrupts() -> Iterator[None]:
    """Block the signals to stop or to save; signals that arrive meanwhile are delivered later."""
    # Starting the resource tracker unblocks these signals, so it has to run before they are
    # blocked.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
