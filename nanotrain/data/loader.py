"""Microbatches for one rank, loaded inline or by worker processes.

    MicrobatchSampler (numbers) -> _Reader (samples, stacked) in this process or in a worker -> Batch

Everything a batch depends on is its sample numbers, so resuming means starting with another `consumed_samples`,
and workers change time, never values.

Workers come from a fork server, not from `fork`: the trainer has gloo, OpenMP and CUDA threads, and a fork that
copies a held lock hangs. The server imports torch once (1.3 s, beside the trainer's own start) and is shared by all
loaders of a process. SIGINT and SIGTERM are blocked while processes start and that mask is inherited: an
interrupt, which reaches the whole process group, is the trainer's to handle and leaves the workers at work until it
closes them.
"""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset

from nanotrain.data.batch import Batch, SampleDataset, collate
from nanotrain.data.sampler import MicrobatchSampler, SamplerConfig
from nanotrain.data.worker import Failure, end_with_parent
from nanotrain.errors import DataError, EnvironmentFault

_INTERRUPTS = frozenset({signal.SIGINT, signal.SIGTERM})
# In microbatches and per worker: at least double buffering, at most what keeps /dev/shm small.
_LEAST_PREFETCH, _MOST_PREFETCH = 2, 16


class _Reader(Dataset[Any]):
    def __init__(self, samples: SampleDataset) -> None:
        self.samples = samples

    def __getitems__(self, numbers: Sequence[int]) -> Batch | Failure:
        try:
            return collate([self.samples[number] for number in numbers])
        except DataError as error:
            return Failure.of(error)


class GlobalBatchLoader:
    """This rank's microbatches, one global batch after the other, without end.

    Args:
        samples: what is read.
        place: where this rank stands among the readers.
        consumed_samples: samples all ranks together have read before; the exact point to go on from.
        num_workers: processes that load ahead; 0 loads when asked.
        pin_memory: leave batches in page-locked memory, for copies to a GPU.
    """

    def __init__(
        self,
        samples: SampleDataset,
        *,
        place: SamplerConfig,
        consumed_samples: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.place = place
        self.num_workers = num_workers
        self._microbatches: Iterator[Batch | Failure] | None
        prefetch = -(-2 * place.num_microbatches // max(1, num_workers))
        loader = DataLoader(
            _Reader(samples),
            batch_sampler=MicrobatchSampler(place, consumed_samples),
            collate_fn=_as_it_is,
            worker_init_fn=_start_worker if num_workers else None,
            num_workers=num_workers,
            multiprocessing_context=_fork_server() if num_workers else None,
            prefetch_factor=min(max(prefetch, _LEAST_PREFETCH), _MOST_PREFETCH) if num_workers else None,
            pin_memory=pin_memory,
        )
        with _interrupts_blocked():
            self._microbatches = iter(loader)

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        """The microbatches of the next global batch, in order.

        Raises:
            DataError: a sample that cannot be used.
            EnvironmentFault: a worker process died.
        """
        return [self._next_microbatch() for _ in range(self.place.num_microbatches)]

    def close(self) -> None:
        """End the worker processes; calling it again does nothing."""
        microbatches, self._microbatches = self._microbatches, None
        shutdown = getattr(microbatches, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()

    def __enter__(self) -> "GlobalBatchLoader":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _next_microbatch(self) -> Batch:
        assert self._microbatches is not None, "a closed loader has no more batches"
        try:
            batch = next(self._microbatches)
        except (RuntimeError, OSError, EOFError) as error:
            # A worker that is gone shows as torch's RuntimeError or as the end of its socket.
            if self.num_workers and (not isinstance(error, RuntimeError) or "DataLoader worker" in str(error)):
                raise EnvironmentFault(
                    "a data worker process died",
                    why=f"{str(error) or type(error).__name__}; most often memory or /dev/shm ran out",
                    fix="lower --num-workers, or set --num-workers 0 to load in the training process",
                ) from None
            raise
        if isinstance(batch, Failure):
            raise batch.error()
        return batch


def _as_it_is(batch: Any) -> Any:
    return batch


def _start_worker(worker: int) -> None:
    end_with_parent()
    # For the whole process: its other threads have the mask only where the fork server was started with it.
    for number in _INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)


def _fork_server() -> Any:
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "nanotrain.data.loader"])
    return context


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM; what arrives meanwhile is delivered afterwards, to this process only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Starting the resource tracker ends with these signals unblocked, so it has to run before they are blocked.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
