"""Samples stack into batches of the promised types."""

from dataclasses import replace

import numpy as np
import torch

from nanotrain.data.batch import Batch, Sample, collate


def _sample(value: int, *, documents: bool) -> Sample:
    ids = np.full(4, value)
    mask = np.array([1, 1, 0, 1], dtype=np.float32)
    return Sample(
        ids, ids + 1, mask, segment_ids=np.zeros(4, dtype=np.int32) if documents else None
    )


def test_fields_keep_their_dtype_and_rows_their_order() -> None:
    batch = collate([_sample(3, documents=True), _sample(5, documents=True)])
    assert batch.tokens.tolist() == [[3] * 4, [5] * 4]
    assert batch.labels.tolist() == [[4] * 4, [6] * 4]
    assert (batch.tokens.dtype, batch.loss_mask.dtype, batch.segment_ids.dtype) == (
        torch.int64,
        torch.float32,
        torch.int32,
    )
    assert batch.position_ids is None


def test_masked_tokens_are_no_targets_on_any_device() -> None:
    batch = collate([_sample(3, documents=False)] * 2)
    assert batch.num_target_tokens.item() == 6
    moved = batch.to("meta")
    assert moved.tokens.device.type == "meta"
    assert moved.segment_ids is None
    documents = collate([_sample(3, documents=True)]).to("meta").segment_ids
    assert documents is not None and documents.device.type == "cpu"


def test_sequences_further_on_end_with_the_sequence_or_the_document() -> None:
    tokens = torch.arange(6)[None]
    batch = Batch(tokens, tokens + 1, torch.tensor([[1.0, 1, 0, 1, 1, 1]]))
    shifted_by_1, shifted_by_2 = batch.with_mtp(2).mtp
    assert shifted_by_1.tokens.tolist() == [
        [1, 2, 3, 4, 5, 0]
    ] and shifted_by_2.labels.tolist() == [[3, 4, 5, 6, 0, 0]]
    assert shifted_by_1.loss_mask.tolist() == [[1, 0, 1, 1, 1, 0]]
    documents = replace(
        batch, segment_ids=torch.tensor([[0, 0, 0, 0, 1, 1]], dtype=torch.int32)
    ).with_mtp(2)
    assert [each.loss_mask.tolist() for each in documents.mtp] == [
        [[1, 0, 1, 0, 1, 0]],
        [[0, 1, 0, 0, 0, 0]],
    ]
    assert documents.to("meta").mtp[1].labels.device.type == "meta"
