"""The next global batch, agreed upon by all ranks.

Before every step one small collective, the roll call, carries some numbers of every rank: how many target tokens and
samples its microbatches hold (the loss is divided by the global number), whether it was asked to stop, and whether
its data failed. So no rank enters a step that another one will not take, and an error on one rank ends all of them.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from nanotrain.comm.collectives import all_gather_object, all_reduce_scalars
from nanotrain.comm.group import Group
from nanotrain.data.batch import Batch
from nanotrain.errors import DataError, NanotrainError


@dataclass(frozen=True)
class GlobalBatch:
    """What one rank trains on in one step.

    Attributes:
        microbatches: this rank's part, on its device.
        num_target_tokens: predictions that count in the whole global batch, over all ranks.
        num_samples: of the whole global batch.
        wait_s: how long this rank waited for its data.
    """

    microbatches: tuple[Batch, ...]
    num_target_tokens: int
    num_samples: int
    wait_s: float


class BatchIterator:
    """This rank's stream of global batches.

    Args:
        batches: yields this rank's microbatches of one global batch after the other.
        group: all ranks, for the roll call; its tensors live on the host.
        device: where microbatches are needed.
        readers_per_sample: ranks that read the same sample (tp x pp x cp), so that tokens are counted once.
        split: what this rank holds of a microbatch: its part of the sequences under context parallelism.
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

    def next(self, *, wants_stop: bool = False) -> GlobalBatch | None:
        """The next global batch, or None if any rank wants to stop; then no rank has used up a batch.

        Args:
            wants_stop: whether this rank was asked to stop.

        Raises:
            NanotrainError: some rank's data failed; the same error on every rank.
        """
        failure: NanotrainError | None = None
        microbatches: list[Batch] = []
        start = time.perf_counter()
        try:
            microbatches = next(self._batches)
        except NanotrainError as error:
            failure = error
        wait_s = time.perf_counter() - start
        tokens = sum(float(batch.num_target_tokens) for batch in microbatches) / self._readers_per_sample
        samples = sum(len(batch.tokens) for batch in microbatches) / self._readers_per_sample
        votes = [tokens, samples, float(wants_stop), float(failure is not None)]
        all_tokens, all_samples, stops, failures = all_reduce_scalars(votes, self._group)
        if failures:
            self._raise_together(failure)
        if stops:
            return None
        held = (self._split(batch.to(self._device)) for batch in microbatches)
        return GlobalBatch(tuple(held), round(all_tokens), round(all_samples), wait_s)

    def _raise_together(self, failure: NanotrainError | None) -> None:
        parts = (failure.what, failure.why, failure.fix) if failure else None
        what, why, fix = next(found for found in all_gather_object(parts, self._group) if found)
        raise DataError(what, why=why, fix=fix)
