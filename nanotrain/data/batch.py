"""Samples and microbatches.

    Sample            one sequence as numpy arrays, from a dataset
    SampleDataset     samples by index
    JoinedDatasets    samples of several datasets
    Batch             samples stacked into torch tensors by `collate`
    split_sequences   shorter sequences from the samples of a batch

Shape legend: B samples per microbatch, S tokens per sample.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

# sample indices are below; the bits above are the number of a sequence in its sample
SEQUENCE_BITS = 50


@dataclass(frozen=True)
class Sample:
    """One training sequence."""

    tokens: np.ndarray  # [S] int64, the inputs
    labels: np.ndarray  # [S] int64, the next token of every input
    # [S] float32, above 0 where the prediction counts in the loss: 1, or its factor there
    loss_mask: np.ndarray
    position_ids: np.ndarray | None = None  # [S] int64, or None for 0..S-1
    # [S] int32, equal inside a document; None where attention crosses documents
    segment_ids: np.ndarray | None = None


class SampleDataset(Protocol):
    """An endless dataset: each sample is a pure function of its index.

    Indices continue after an epoch: index n is sample n % samples_per_epoch of epoch n //
    samples_per_epoch.
    """

    @property
    def samples_per_epoch(self) -> int:
        """Samples per pass over the data."""

    def __getitem__(self, index: int) -> Sample:
        """Sample `index` >= 0."""


@runtime_checkable
class JoinedDatasets(SampleDataset, Protocol):
    """A dataset whose samples are those of several datasets, as of a blend."""

    @property
    def datasets(self) -> tuple[SampleDataset, ...]:
        """The datasets, each with samples of its own."""


@dataclass(frozen=True)
class Batch:
    """One microbatch."""

    tokens: Tensor  # [B, S] int64
    labels: Tensor  # [B, S] int64
    loss_mask: Tensor  # [B, S] float32
    position_ids: Tensor | None = None  # [B, S] int64, or None for 0..S-1 in every row
    # [B, S] int32 on the host, or None where attention crosses documents
    segment_ids: Tensor | None = None
    # [B] int64, indices of the samples in the data; None where they have none
    sample_ids: Tensor | None = None
    # [B] int64, the corpus of every sample; None with a single corpus
    source_ids: Tensor | None = None
    # the sequences shifted by 1, 2, ... tokens, for multi-token prediction
    mtp: tuple["Batch", ...] = ()
    # not part of the global batch: it has no target tokens, and routers do not count it
    is_padding: bool = False

    @classmethod
    def from_tokens(cls, tokens: Tensor) -> "Batch":
        """A batch of tokens [B, S] without labels, for inference."""
        no_loss = torch.zeros(tokens.shape, device=tokens.device)
        return cls(tokens, torch.zeros_like(tokens), no_loss)

    @property
    def num_target_tokens(self) -> Tensor:
        """Predictions that count in the loss, a scalar on the batch's device."""
        return (self.loss_mask > 0).sum()

    def to(self, device: torch.device | str) -> "Batch":
        """Copy the batch to a device, asynchronously from pinned memory.

        Segment ids stay in host memory: attention masks are planned on the host, which would
        otherwise wait for the device.
        """
        moved = self._map(lambda tensor: tensor.to(device, non_blocking=True))
        return replace(moved, segment_ids=self.segment_ids)

    def pin_memory(self) -> "Batch":
        """Copy the batch into page-locked memory; called by torch's DataLoader."""
        return self._map(lambda tensor: tensor.pin_memory())

    def share_memory(self) -> "Batch":
        """Move the tensors to shared memory, for another process."""
        return self._map(lambda tensor: tensor.share_memory_())

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """The batch with every tensor changed."""
        tensors: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                tensors[field.name] = change(value)
        return replace(self, **tensors, mtp=tuple(shifted._map(change) for shifted in self.mtp))

    def with_mtp(self, num_layers: int) -> "Batch":
        """Add the sequences shifted by 1 to `num_layers` tokens (DeepSeek-V3, section 2.2).

        Position i of the k-th one has token, label and mask of position i + k. The mask is 0 if
        that is beyond the end of the sequence, or in another document and attention does not cross
        documents.
        """
        shifted = [self._shifted(distance) for distance in range(1, num_layers + 1)]
        return replace(self, mtp=tuple(shifted))

    def _shifted(self, distance: int) -> "Batch":
        """The batch with tokens and labels `distance` positions later; masked across documents."""

        def shift(tensor: Tensor) -> Tensor:
            shifted = torch.zeros_like(tensor, pin_memory=tensor.is_pinned())
            shifted[:, :-distance] = tensor[:, distance:]
            return shifted

        mask = shift(self.loss_mask)
        segments = self.segment_ids
        if segments is not None:
            # in place: the mask stays pinned
            mask.masked_fill_(shift(segments) != segments, 0.0)
        return Batch(shift(self.tokens), shift(self.labels), mask)


def collate(samples: Sequence[Sample]) -> Batch:
    """Stack B samples of one length, all with the same optional fields, into a batch."""
    stacked: dict[str, Any] = {}
    for field in fields(Sample):
        rows = [getattr(sample, field.name) for sample in samples]
        stacked[field.name] = None if rows[0] is None else torch.from_numpy(np.stack(rows))
    return Batch(**stacked)


def split_sequences(batch: Batch, length: int | None) -> Batch:
    """Split every sample into N = S / L consecutive sequences: [B, S] -> [B * N, L].

        sample            a  a  a  E  b  b  E  c      S = 8
        sequences         a  a  a  E | b  b  E  c     L = 4
        position_ids      0  1  2  3 | 0  1  2  0     if they restart with a document;
                                                      else None, for 0..L-1

    The label of the last token of a sequence is the first token of the next one. The sequences of a
    sample get different sample ids, so that their dropout masks differ.

    Args:
        batch: a microbatch without labels of multi-token prediction.
        length: L, which divides S; None for S.
    """
    if length is None or length == batch.tokens.shape[1]:
        return batch
    num_samples, sample_length = batch.tokens.shape
    parts = sample_length // length
    assert not batch.mtp, "labels of multi-token prediction end with a sequence"

    def split(tensor: Tensor) -> Tensor:
        if tensor.dim() == 2:
            return tensor.reshape(-1, length)
        return tensor.repeat_interleave(parts)

    sequences = batch._map(split)
    positions = sequences.position_ids
    if positions is not None:
        positions = _count_from_zero(positions)
    ids = sequences.sample_ids
    if ids is not None:
        ids = ids + (torch.arange(parts).repeat(num_samples) << SEQUENCE_BITS)
    return replace(sequences, position_ids=positions, sample_ids=ids)


def _count_from_zero(positions: Tensor) -> Tensor:
    """[B * N, L]: a document that began in an earlier sequence counts from the sequence's start."""
    is_continued = (positions == 0).cumsum(dim=1) == 0
    offsets = torch.where(is_continued, positions[:, :1], 0)
    return positions.sub_(offsets)  # in place: it stays pinned
