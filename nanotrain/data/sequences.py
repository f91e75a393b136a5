"""Samples split into shorter sequences, for a schedule of sequence lengths.

    sample            a  a  a  E  b  b  E  c      S = 8
    sequences         a  a  a  E | b  b  E  c     L = 4
    position_ids      0  1  2  3 | 0  1  2  0     where they restart with a document; else None, for 0..L-1

Shape legend: B samples per microbatch, S tokens per sample, L tokens per sequence, N = S / L.
"""

from dataclasses import replace

import torch
from torch import Tensor

from nanotrain.data.batch import Batch

SEQUENCE_BITS = 50  # sample indices are below; the bits above are the number of a sequence in its sample


def split_sequences(batch: Batch, length: int | None) -> Batch:
    """Split every sample of a microbatch into consecutive sequences: [B, S] -> [B * N, L].

    The label of the last token of a sequence is the first token of the next one. The sequences of a sample get
    different sample ids, so that their dropout masks differ.

    Args:
        batch: without labels of multi-token prediction.
        length: L, which divides S; None for S.
    """
    parts = 1 if length is None else batch.tokens.shape[1] // length
    if parts == 1:
        return batch
    assert not batch.mtp, "labels of multi-token prediction end with a sequence"

    def split(tensor: Tensor) -> Tensor:
        return tensor.reshape(-1, batch.tokens.shape[1] // parts)

    ids, positions, segments = batch.sample_ids, batch.position_ids, batch.segment_ids
    return replace(
        batch,
        tokens=split(batch.tokens),
        labels=split(batch.labels),
        loss_mask=split(batch.loss_mask),
        position_ids=None if positions is None else _from_zero(split(positions)),
        segment_ids=None if segments is None else split(segments),
        sample_ids=None if ids is None else (ids[:, None] + (torch.arange(parts) << SEQUENCE_BITS)).flatten(),
        source_ids=None if batch.source_ids is None else batch.source_ids.repeat_interleave(parts),
    )


def _from_zero(positions: Tensor) -> Tensor:
    """[B * N, L]: tokens of a document that began in an earlier sequence count from the start of their own."""
    is_continued = (positions == 0).cumsum(dim=1) == 0
    return positions.sub_(positions[:, :1] * is_continued)
