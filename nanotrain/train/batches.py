"""Global batches, with the counts that all ranks agree on before every step.

Before each step one small all-reduce carries the target tokens of every rank's microbatches (the loss is
divided by the global count), whether a rank wants to stop or to save, and whether its data failed. So all ranks enter a
step or none does, and an error on one rank is raised on all of them.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from nanotrain.comm.collectives import all_gather_object, all_reduce_scalars
from nanotrain.comm.group import Group
from nanotrain.data.batch import Batch
from nanotrain.errors import NanotrainError


@dataclass(frozen=True)
class GlobalBatch:
    """One rank's part of a global batch."""

    microbatches: tuple[Batch, ...]  # of this rank, on its device
    num_target_tokens: int  # unmasked target tokens of the global batch, over all ranks
    wait_s: float  # seconds that this rank waited for data
    wants_save: bool = False  # whether a rank asked to save before this batch
    busy_s: tuple[float, ...] = ()  # by rank: seconds of the step before in which it did not wait for other ranks


class BatchIterator:
    """Iterator over the global batches of this rank.

    Args:
        batches: this rank's microbatches per global batch.
        group: all ranks; its tensors are on the host.
        device: of the microbatches.
        readers_per_sample: ranks that read the same sample (tp x pp x cp), so that it is counted once.
        split: selects the sequence shard of this rank under context parallelism.
    """

    def __init__(
        self,
        batches: Iterator[list[Batch]],
        group: Group,
        *,
        device: torch.device,
        readers_per_sample: int = 1,
        split: Callable[[Batch], Batch] = lambda batch: batch,
    ) -> None:
        self._batches, self._group, self._device, self._split = batches, group, device, split
        self._readers_per_sample = readers_per_sample

    def next(
        self,
        *,
        wants_stop: bool = False,
        wants_save: bool = False,
        failure: NanotrainError | None = None,
        busy_s: float | None = None,
    ) -> GlobalBatch | None:
        """The next global batch; None if any rank wants to stop.

        Args:
            wants_stop: whether this rank received a signal or reached its time limit.
            wants_save: whether this rank was asked to save and go on.
            failure: an error of this rank since the last step.
            busy_s: seconds of the last step in which this rank did not wait for others; None on every rank if unknown.

        Raises:
            NanotrainError: some rank or its data failed; the same error on every rank.
        """
        microbatches: list[Batch] = []
        start = time.perf_counter()
        try:
            microbatches = next(self._batches)
        except NanotrainError as error:
            failure = failure or error
        wait_s = time.perf_counter() - start
        tokens = sum(float(batch.num_target_tokens) for batch in microbatches) / self._readers_per_sample
        counts = [tokens, float(wants_stop), float(wants_save), float(failure is not None)]
        all_busy = [0.0] * self._group.size if busy_s is not None else []
        if busy_s is not None:
            all_busy[self._group.index] = busy_s
        sums = all_reduce_scalars([*counts, *all_busy], self._group)
        all_tokens, stops, saves, failures, *all_busy = sums
        if failures:
            raise_on_all(failure, self._group)
        if stops:
            return None
        local = (self._split(batch.to(self._device)) for batch in microbatches)
        return GlobalBatch(tuple(local), round(all_tokens), wait_s, wants_save=saves > 0, busy_s=tuple(all_busy))


def raise_on_all(failure: NanotrainError | None, group: Group) -> None:
    """Raise the first error of the ranks on every rank; return if there is none.

    Args:
        failure: of this rank.
        group: all ranks.

    Raises:
        NanotrainError: the same on every rank.
    """
    for error in all_gather_object(failure, group):
        if error is not None:
            raise error
