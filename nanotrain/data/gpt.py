"""Windows of a token stream as training samples.

    sample number --(divmod by samples_per_epoch)--> epoch, place
    place --(keyed permutation of the epoch, or as it is)--> window i
    window i --> tokens [first + i*S, first + i*S + S + 1) of the corpus; the last one is only a label

A window crosses documents. What then follows from the boundaries, which the `.idx` knows, so no tokenizer is
needed: the end-of-document token is the last token of its document, as `nanotrain prepare` and Megatron-LM write
it.

    stream        a  a  a  E  b  b  E  c  c
    position_ids  0  1  2  3  0  1  2  0  1     reset_position_ids
    document_ids  0  0  0  0  1  1  1  2  2     reset_attention_mask
    loss_mask     1  1  1  0  1  1  0  1  1     eod_mask_loss: reading E, the next document cannot be foretold
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from nanotrain.data.batch import Sample
from nanotrain.data.indexed import IndexedTokens
from nanotrain.data.permutation import Permutation
from nanotrain.errors import DataError


@dataclass(frozen=True)
class WindowOptions:
    """How a stream is cut into samples.

    Args:
        seq_length: S, tokens of a sample.
        vocab_size: token ids must lie in [0, vocab_size).
        seed: key of the order of every epoch.
        shuffle: visit the windows in that order; off: as they lie.
        reset_position_ids: count positions from each document's start.
        reset_attention_mask: say which document each token belongs to.
        eod_mask_loss: leave what follows an end-of-document token out of the loss.
    """

    seq_length: int
    vocab_size: int
    seed: int = 0
    shuffle: bool = True
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    @property
    def needs_documents(self) -> bool:
        """Whether document boundaries have to be looked up."""
        return self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss


@dataclass(frozen=True)
class GPTDataset:
    """The windows of tokens [start, stop) of a corpus.

    Args:
        corpus: the token files.
        start: stream offset of the first token that belongs to the split.
        stop: stream offset behind its last token.
        options: how windows are cut and ordered.
    """

    corpus: IndexedTokens
    start: int
    stop: int
    options: WindowOptions

    @property
    def samples_per_epoch(self) -> int:
        """Windows of the split; each needs one token more than it has inputs."""
        return max(0, self.stop - self.start - 1) // self.options.seq_length

    def __getitem__(self, sample_number: int) -> Sample:
        """The sample of that number, for any number from 0 on.

        Raises:
            DataError: the window holds a token id outside the vocabulary.
        """
        seq_length = self.options.seq_length
        epoch, window = divmod(sample_number, self.samples_per_epoch)
        if self.options.shuffle:
            window = _order(self.samples_per_epoch, seed=self.options.seed, epoch=epoch)[window]
        first = self.start + window * seq_length
        ids = self.corpus.read(first, first + seq_length + 1).astype(np.int64)
        self._check_vocabulary(ids, first)
        if not self.options.needs_documents:
            return Sample(ids[:-1], ids[1:], loss_mask=np.ones(seq_length, dtype=np.float32))
        starts = self.corpus.document_starts(first + 1, first + seq_length + 1) - first
        return self._with_documents(ids, starts)

    def _with_documents(self, ids: np.ndarray, starts: np.ndarray) -> Sample:
        # `starts` are the places in (0, S] where a document begins; the window's own first counts from the window,
        # as in Megatron-LM, so positions stay below S.
        options, seq_length = self.options, self.options.seq_length
        loss_mask = np.ones(seq_length, dtype=np.float32)
        if options.eod_mask_loss:
            loss_mask[starts - 1] = 0.0
        inside = starts[starts < seq_length]
        begins = np.zeros(seq_length, dtype=np.int64)
        begins[inside] = inside
        positions = np.arange(seq_length) - np.maximum.accumulate(begins)
        steps = np.zeros(seq_length, dtype=np.int32)
        steps[inside] = 1
        return Sample(
            ids[:-1],
            ids[1:],
            loss_mask=loss_mask,
            position_ids=positions if options.reset_position_ids else None,
            segment_ids=np.cumsum(steps, dtype=np.int32) if options.reset_attention_mask else None,
        )

    def _check_vocabulary(self, ids: np.ndarray, first: int) -> None:
        low, high = int(ids.min()), int(ids.max())
        if low >= 0 and high < self.options.vocab_size:
            return
        bad = high if high >= self.options.vocab_size else low
        place = first + int(np.argmax(ids == bad))
        raise DataError(
            f"token id {bad} at position {place} of {self.corpus.bin_file}",
            why=f"the model's vocabulary holds ids 0 to {self.options.vocab_size - 1}",
            fix="set --vocab-size to the tokenizer's, or prepare the corpus with the model's tokenizer",
        )


@lru_cache(maxsize=64)
def _order(size: int, *, seed: int, epoch: int) -> Permutation:
    return Permutation(size, seed=seed, epoch=epoch)
