"""Fixed-length samples from a token stream.

    GPTDataset         the samples of training
    AllWindows         the windows in file order, for evaluation
    SyntheticDataset   random tokens
    permuted           one element of a random permutation

How a sample index becomes tokens:

    sample index --(divmod by samples_per_epoch)--> epoch, position
    position     --(keyed permutation of the epoch, or unchanged)--> window i
    window i     --> tokens [start + i*S, start + i*S + S + 1) of the corpus; the last one is only a
                     label

A window crosses document boundaries. The `.idx` stores them, so no tokenizer is needed: the
end-of-document token (E) is the last token of its document, as `nanotrain prepare` and Megatron-LM
write it.

    stream        a  a  a  E  b  b  E  c  c
    position_ids  0  1  2  3  0  1  2  0  1     reset_position_ids
    segment_ids   0  0  0  0  1  1  1  2  2     reset_attention_mask
    loss_mask     1  1  1  0  1  1  0  1  1     eod_mask_loss: E does not predict what follows
"""

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import NamedTuple

import numpy as np

from nanotrain.config.config import DataConfig
from nanotrain.data.batch import Sample
from nanotrain.data.indexed import IndexedTokens
from nanotrain.errors import DataError

_ROUNDS = 6  # rounds of the Feistel network
_MASK64 = (1 << 64) - 1


class Part(NamedTuple):
    """The part of a document in a sample."""

    document: int  # index in the corpus
    start: int  # stream offset of the first token
    stop: int  # stream offset after the last token
    offset: int  # position of the first token in the S + 1 tokens of the sample


@dataclass(frozen=True)
class GPTDataset:
    """Samples from tokens [start, stop) of a corpus."""

    corpus: IndexedTokens  # the token files
    start: int  # stream offset of the first token of the split
    stop: int  # stream offset after its last token
    config: DataConfig  # sequence length S, shuffle, and what ends at a document
    _: KW_ONLY
    vocab_size: int  # token ids must be in [0, vocab_size)
    seed: int = 0  # key of the shuffle of every epoch
    excluded: frozenset[int] = frozenset()  # documents that are not read
    # changes to every sample, in order
    changes: tuple[Callable[["GPTDataset", int, Sample], Sample], ...] = ()

    @property
    def samples_per_epoch(self) -> int:
        """Windows in the split; the last label takes one token more."""
        return max(0, self.stop - self.start - 1) // self.config.seq_length

    def __getitem__(self, index: int) -> Sample:
        """Sample `index` >= 0; indices continue after an epoch.

        Raises:
            DataError: the window holds a token id outside the vocabulary.
        """
        sample = self._read_sample(index)
        for change in self.changes:
            sample = change(self, index, sample)
        return self._without_excluded(sample, index) if self.excluded else sample

    def _read_sample(self, index: int) -> Sample:
        first = self.start + self.window(index) * self.config.seq_length
        return self._sample(self._read(first, first + self.config.seq_length + 1), first)

    def window(self, index: int) -> int:
        """The index of the token window that sample `index` >= 0 reads, shuffled per epoch."""
        epoch, window = divmod(index, self.samples_per_epoch)
        if self.config.shuffle:
            window = permuted(window, self.samples_per_epoch, seed=self.seed, epoch=epoch)
        return window

    def index_of(self, window: int, epoch: int) -> int:
        """The index of the sample that is a window in an epoch; the inverse of `window`."""
        size = self.samples_per_epoch
        if self.config.shuffle:
            window = permuted(window, size, seed=self.seed, epoch=epoch, inverse=True)
        return epoch * size + window

    def parts(self, index: int) -> Iterator[Part]:
        """The parts of documents in the S + 1 tokens of a sample, in order."""
        first = self.start + self.window(index) * self.config.seq_length
        last = first + self.config.seq_length + 1
        for document, start, stop in self.corpus.documents_in(first, last):
            yield Part(document, start, stop, start - first)

    def windows_with(self, document: int) -> Sequence[int]:
        """The windows whose first S tokens hold a token of a document."""
        start = self.corpus.document_start(document)
        stop = self.corpus.document_start(document + 1)
        if start == stop:
            return range(0)
        first = max(0, start - self.start) // self.config.seq_length
        last = (min(stop, self.stop) - 1 - self.start) // self.config.seq_length
        return range(first, min(last + 1, self.samples_per_epoch))

    def num_tokens(self, before: int, after: int) -> int:
        """Tokens in the first S tokens of samples [before, after)."""
        return (after - before) * self.config.seq_length

    def _without_excluded(self, sample: Sample, index: int) -> Sample:
        """A sample with excluded documents masked, their tokens replaced by end-of-document."""
        ids = np.append(sample.tokens, sample.labels[-1])
        loss_mask = sample.loss_mask.copy()
        for part in self.parts(index):
            if part.document in self.excluded:
                end = self.corpus.document_start(part.document + 1)
                after = part.offset + part.stop - part.start
                ids[part.offset : after] = self.corpus.read(end - 1, end)[0]
                loss_mask[max(0, part.offset - 1) : after - 1] = 0.0
        return replace(sample, tokens=ids[:-1], labels=ids[1:], loss_mask=loss_mask)

    def _sample(self, ids: np.ndarray, first: int) -> Sample:
        """A sample of S + 1 tokens of the stream, with the masks and positions of its documents.

        A document that started before the window counts from the window's start, as in Megatron-LM,
        so positions stay below S.

        Args:
            ids: the tokens.
            first: stream offset of the first one.
        """
        config = self.config
        seq_length = config.seq_length
        last = min(first + seq_length + 1, self.stop)
        starts = np.zeros(0, dtype=np.int64)  # positions in (0, S] at which documents start
        if config.reset_position_ids or config.reset_attention_mask or config.eod_mask_loss:
            starts = self.corpus.document_starts(first + 1, last) - first
        loss_mask = np.ones(seq_length, dtype=np.float32)
        if self.corpus.mask_file is not None:
            targets = self.corpus.read_mask(first + 1, last)
            loss_mask[: len(targets)] = targets
        if config.eod_mask_loss:
            loss_mask[starts - 1] = 0.0
        positions = np.arange(seq_length)
        # number of documents that have started in the window
        segments = np.searchsorted(starts, positions, side="right")
        position_ids = None
        if config.reset_position_ids:
            position_ids = positions - np.append(0, starts)[segments]
        segment_ids = None
        if config.reset_attention_mask:
            segment_ids = segments.astype(np.int32)
        return Sample(
            ids[:-1],
            ids[1:],
            loss_mask=loss_mask,
            position_ids=position_ids,
            segment_ids=segment_ids,
        )

    def _read(self, first: int, last: int) -> np.ndarray:
        """Tokens [first, last) of the stream, int64; all are in the vocabulary."""
        ids = self.corpus.read(first, last).astype(np.int64)
        wrong = np.flatnonzero((ids < 0) | (ids >= self.vocab_size))
        if wrong.size:
            token = ids[wrong[0]]
            position = first + wrong[0]
            raise DataError(
                f"token id {token} at position {position} of {self.corpus.bin_file}",
                why=f"the model's vocabulary has ids 0 to {self.vocab_size - 1}",
                fix=(
                    "set --vocab-size to the tokenizer's, "
                    "or prepare the corpus with the model's tokenizer"
                ),
            )
        return ids


class AllWindows(GPTDataset):
    """The windows of a range in file order: every token but the first is predicted once.

        tokens     t0 t1 t2 t3 | t4 t5 t6 t7 | t8 t9           S = 4
        labels     t1 t2 t3 t4 | t5 t6 t7 t8 | t9 .. .. ..

    The last window is padded, and its padding masked. An index after the last window is a fully
    masked sample: a global batch may pass the end.
    """

    @property
    def samples_per_epoch(self) -> int:
        """Windows, the last one padded."""
        return -(-max(0, self.stop - self.start - 1) // self.config.seq_length)

    def __getitem__(self, index: int) -> Sample:
        """Window `index` >= 0.

        Raises:
            DataError: the window holds a token id outside the vocabulary.
        """
        seq_length = self.config.seq_length
        first = min(self.start + index * seq_length, self.stop)
        count = min(seq_length + 1, self.stop - first)
        ids = self._read(first, first + count) if count else np.zeros(0, dtype=np.int64)
        sample = self._sample(np.pad(ids, (0, seq_length + 1 - count)), first)
        sample.loss_mask[max(0, count - 1) :] = 0.0
        return sample


def permuted(index: int, size: int, *, seed: int, epoch: int, inverse: bool = False) -> int:
    """Element `index` of a random permutation of [0, size), one per seed and epoch; not stored.

    With `inverse` the index at which the permutation has the element `index`.

    A Feistel network is a bijection of [0, 4**h) for any round function. Following its cycle until
    the value is below `size` restricts it to [0, size). With 4**h < 4 * size this takes fewer than
    four steps on average, so one index costs a few microseconds and no memory, for 10 samples or
    10**15.

    Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002), section 4. The round
    function is a keyed splitmix64 finalizer: it mixes well but is not a cipher.

    >>> sorted(permuted(index, 5, seed=1, epoch=0) for index in range(5))
    [0, 1, 2, 3, 4]
    >>> permuted(permuted(3, 5, seed=1, epoch=0), 5, seed=1, epoch=0, inverse=True)
    3
    """
    assert 0 <= index < size, f"index {index} is outside [0, {size}): the loop might not end"
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    key = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    round_keys = struct.unpack(f"<{_ROUNDS}Q", key)
    if inverse:
        round_keys = round_keys[::-1]
    while True:
        left, right = index >> half_bits, index & mask
        # a Feistel network backwards is itself with swapped halves and the keys in reverse
        if inverse:
            left, right = right, left
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right + round_key) & mask)
        index = right << half_bits | left if inverse else left << half_bits | right
        if index < size:
            return index


def _mix(value: int) -> int:
    """The finalizer of SplitMix64: a bijective hash of a 64-bit integer."""
    value &= _MASK64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK64
    return value ^ value >> 31


@dataclass(frozen=True)
class SyntheticDataset:
    """Uniformly random tokens (`--mock-data`), a pure function of (seed, sample index)."""

    vocab_size: int  # tokens are in [0, vocab_size)
    seq_length: int  # S, tokens per sample
    seed: int  # key of the random generator

    @property
    def samples_per_epoch(self) -> int:
        """A number larger than any run reads, so that the mock data never repeats."""
        return 1 << 62

    def __getitem__(self, index: int) -> Sample:
        """Sample `index`, at the same cost for any index: Philox is counter-based."""
        random = np.random.Generator(np.random.Philox(key=[self.seed, index]))
        ids = random.integers(0, self.vocab_size, self.seq_length + 1, dtype=np.int64)
        return Sample(
            tokens=ids[:-1], labels=ids[1:], loss_mask=np.ones(self.seq_length, dtype=np.float32)
        )
