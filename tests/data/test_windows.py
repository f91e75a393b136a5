"""Every token but the first is predicted once, also those of a last window that is not full."""

from pathlib import Path

import numpy as np
import pytest

from nanotrain.data.gpt import GPTDatasetConfig
from nanotrain.data.indexed import IndexedTokens
from nanotrain.data.windows import AllWindows
from nanotrain.prepare.token_writer import TokenWriter


@pytest.mark.parametrize("length", [2, 5, 9, 10])
def test_every_token_but_the_first_is_a_label_once(tmp_path: Path, length: int) -> None:
    with TokenWriter(tmp_path / "tokens", np.dtype(np.int32)) as writer:
        writer.add_document(range(length))
    windows = AllWindows(IndexedTokens(tmp_path / "tokens"), 0, length, GPTDatasetConfig(seq_length=4, vocab_size=50))
    assert windows.samples_per_epoch == {2: 1, 5: 1, 9: 2, 10: 3}[length]
    samples = [windows[index] for index in range(windows.samples_per_epoch + 2)]
    labels = [sample.labels[sample.loss_mask > 0].tolist() for sample in samples]
    assert sum(labels, []) == list(range(1, length))
    assert all(sample.tokens.shape == (4,) for sample in samples) and labels[-2:] == [[], []]


def test_masks_of_documents_stay(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "tokens", np.dtype(np.int32)) as writer:
        for document in ([1, 2, 0], [3, 4, 5, 0]):
            writer.add_document(document)
    config = GPTDatasetConfig(seq_length=4, vocab_size=50, eod_mask_loss=True, reset_attention_mask=True)
    first, second = (AllWindows(IndexedTokens(tmp_path / "tokens"), 0, 7, config)[index] for index in (0, 1))
    assert first.loss_mask.tolist() == [1, 1, 0, 1] and second.loss_mask.tolist() == [1, 1, 0, 0]
    assert first.segment_ids is not None and first.segment_ids.tolist() == [0, 0, 0, 1]
