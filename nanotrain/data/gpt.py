"""Fixed-length samples from a token stream.

    sample index --(divmod by samples_per_epoch)--> epoch, position
    position --(keyed permutation of the epoch, or unchanged)--> window i
    window i --> tokens [start + i*S, start + i*S + S + 1) of the corpus; the last one is only a label

A window crosses document boundaries. The `.idx` stores them, so no tokenizer is needed: the end-of-document token
(E) is the last token of its document, as `nanotrain prepare` and Megatron-LM write it.

    stream        a  a  a  E  b  b  E  c  c
    position_ids  0  1  2  3  0  1  2  0  1     reset_position_ids
    segment_ids   0  0  0  0  1  1  1  2  2     reset_attention_mask
    loss_mask     1  1  1  0  1  1  0  1  1     eod_mask_loss: the next document cannot be predicted from E
"""

from dataclasses import dataclass

import numpy as np

from nanotrain.data.batch import Sample
from nanotrain.data.indexed import IndexedTokens
from nanotrain.data.permutation import Permutation
from nanotrain.errors import DataError


@dataclass(frozen=True)
class GPTDatasetConfig:
    """How a token stream is split into samples."""

    seq_length: int  # S, tokens per sample
    vocab_size: int  # token ids must be in [0, vocab_size)
    seed: int = 0  # key of the shuffle of every epoch
    shuffle: bool = True  # visit the windows in a random order per epoch; off: in file order
    reset_position_ids: bool = False  # count positions from the start of each document
    reset_attention_mask: bool = False  # produce segment ids, so that attention stays inside a document
    eod_mask_loss: bool = False  # mask the loss of predictions made from an end-of-document token


@dataclass(frozen=True)
class GPTDataset:
    """Samples from tokens [start, stop) of a corpus."""

    corpus: IndexedTokens  # the token files
    start: int  # stream offset of the first token of the split
    stop: int  # stream offset after its last token
    config: GPTDatasetConfig  # how the tokens are split and shuffled

    @property
    def samples_per_epoch(self) -> int:
        """Windows in the split; the last label takes one token more."""
        return max(0, self.stop - self.start - 1) // self.config.seq_length

    def __getitem__(self, index: int) -> Sample:
        """Sample `index` >= 0; indices continue after an epoch.

        Raises:
            DataError: the window holds a token id outside the vocabulary.
        """
        config, seq_length = self.config, self.config.seq_length
        epoch, window = divmod(index, self.samples_per_epoch)
        if config.shuffle:
            window = Permutation(self.samples_per_epoch, seed=config.seed, epoch=epoch)[window]
        first = self.start + window * seq_length
        ids = self.corpus.read(first, first + seq_length + 1).astype(np.int64)
        self._check_vocabulary(ids, first)
        if not (config.reset_position_ids or config.reset_attention_mask or config.eod_mask_loss):
            return Sample(ids[:-1], ids[1:], loss_mask=np.ones(seq_length, dtype=np.float32))
        starts = self.corpus.document_starts(first + 1, first + seq_length + 1) - first
        return self._with_documents(ids, starts)

    def _with_documents(self, ids: np.ndarray, starts: np.ndarray) -> Sample:
        """Add masks and positions for documents that start at `starts`, positions in (0, S] of the window.

        A document that started before the window counts from the window's start, as in Megatron-LM, so positions
        stay below S.
        """
        config, seq_length = self.config, self.config.seq_length
        loss_mask = np.ones(seq_length, dtype=np.float32)
        if config.eod_mask_loss:
            loss_mask[starts - 1] = 0.0
        inside = starts[starts < seq_length]
        begins = np.zeros(seq_length, dtype=np.int64)
        begins[inside] = inside
        positions = np.arange(seq_length) - np.maximum.accumulate(begins)
        is_start = np.zeros(seq_length, dtype=np.int32)
        is_start[inside] = 1
        return Sample(
            ids[:-1],
            ids[1:],
            loss_mask=loss_mask,
            position_ids=positions if config.reset_position_ids else None,
            segment_ids=np.cumsum(is_start, dtype=np.int32) if config.reset_attention_mask else None,
        )

    def _check_vocabulary(self, ids: np.ndarray, first: int) -> None:
        low, high = int(ids.min()), int(ids.max())
        if low >= 0 and high < self.config.vocab_size:
            return
        bad = high if high >= self.config.vocab_size else low
        offset = first + int(np.argmax(ids == bad))
        raise DataError(
            f"token id {bad} at position {offset} of {self.corpus.bin_file}",
            why=f"the model's vocabulary has ids 0 to {self.config.vocab_size - 1}",
            fix="set --vocab-size to the tokenizer's, or prepare the corpus with the model's tokenizer",
        )
