"""Samples of whole documents (`--packing best_fit`), for texts such as conversations.

    documents      aaaaaaa   bbb   cc   dddddddddddd          S = 8, so a sample has S + 1 tokens
    pieces         aaaaaaa   bbb   cc   ddddddddd  dddd       longer documents are divided; the
                                                              last token is read again
    samples        aaaaaaacc | bbbdddd.. | ddddddddd          a piece goes into the fullest sample
                                                              that has space

A token attends to its document alone and no document is predicted from another, so every token but
the first of a document is a target once per epoch. The rest of a sample is padding, which is
masked. Opening takes time and memory in proportion to the number of documents: 4 s and 25 MB per
million (measured).

Source: Ding et al. 2024, "Fewer Truncations Improve Language Modeling" (best-fit decreasing).
"""

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from nanotrain.data.batch import Sample
from nanotrain.data.gpt import GPTDataset, Part


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The bin of every piece: by descending length, in the bin with the least space that is enough.

    >>> best_fit(np.array([7, 3, 2, 9, 4]), 9).tolist()
    [1, 2, 2, 0, 2]
    """
    bins = np.empty(len(lengths), dtype=np.int64)
    bins_by_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    spaces = 0  # a bit for every space that some bin has
    num_bins = 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        fitting = spaces >> length
        if fitting:
            lowest_bit = fitting & -fitting
            space = length + lowest_bit.bit_length() - 1
            bin_index = bins_by_space[space].pop()
            if not bins_by_space[space]:
                spaces ^= 1 << space
        else:
            space = capacity
            bin_index = num_bins
            num_bins += 1
        bins[piece] = bin_index
        rest = space - length
        if rest:
            bins_by_space[rest].append(bin_index)
            spaces |= 1 << rest
    return bins


class _Packs(NamedTuple):
    """The pieces of documents in every sample of an epoch."""

    pieces: np.ndarray  # [pieces, 3] document, first and last token of the stream, by sample
    ends: np.ndarray  # [samples + 1] the first piece of every sample, and the end


class PackedDataset(GPTDataset):
    """Samples of whole documents from a range of documents of a corpus."""

    @cached_property
    def _packs(self) -> _Packs:
        """The pieces of all documents, packed into samples."""
        length = self.config.seq_length
        pieces = []
        for document, start, stop in self.corpus.documents_in(self.start, self.stop):
            # the last token of a piece is the first of the next, which it predicts from
            for first in range(start, max(stop - 1, start + 1), length):
                pieces.append((document, first, min(first + length + 1, stop)))
        table = np.array(pieces, dtype=np.int64).reshape(-1, 3)
        bins = best_fit(table[:, 2] - table[:, 1], length + 1)
        order = np.argsort(bins, kind="stable")
        num_bins = bins.max(initial=-1) + 1
        ends = np.searchsorted(bins[order], np.arange(num_bins + 1))
        return _Packs(table[order], ends)

    @property
    def samples_per_epoch(self) -> int:
        """Samples per pass over the documents."""
        return len(self._packs.ends) - 1

    def parts(self, index: int) -> Iterator[Part]:
        """The documents in the S + 1 tokens of a sample, in order."""
        return self._window_parts(self.window(index))

    def _window_parts(self, window: int) -> Iterator[Part]:
        """The pieces of documents in a sample, in order."""
        packs = self._packs
        first = packs.ends[window]
        last = packs.ends[window + 1]
        offset = 0
        for document, start, stop in packs.pieces[first:last].tolist():
            yield Part(document, start, stop, offset)
            offset += stop - start

    def windows_with(self, document: int) -> list[int]:
        """The samples of an epoch whose first S tokens hold a token of a document."""
        packs = self._packs
        pieces = np.flatnonzero(packs.pieces[:, 0] == document)
        windows = np.unique(np.searchsorted(packs.ends, pieces, side="right") - 1)
        return [window for window in windows.tolist() if self._holds(window, document)]

    def _holds(self, window: int, document: int) -> bool:
        """Whether the first S tokens of a sample hold a token of a document."""
        length = self.config.seq_length
        parts = self._window_parts(window)
        return any(part.document == document and part.offset < length for part in parts)

    def num_tokens(self, before: int, after: int) -> int:
        """Tokens of documents in the first S tokens of samples [before, after)."""
        pieces, ends = self._packs
        sizes = np.add.reduceat(pieces[:, 2] - pieces[:, 1], ends[:-1])
        windows = [self.window(index) for index in range(before, after)]
        return sum(min(int(sizes[window]), self.config.seq_length) for window in windows)

    def _read_sample(self, index: int) -> Sample:
        """Read the documents of one sample one after the other; unused tokens are padding."""
        length = self.config.seq_length
        ids = np.zeros(length + 1, dtype=np.int64)
        loss_mask = np.zeros(length, dtype=np.float32)
        positions = np.arange(length + 1)
        segments = np.full(length + 1, -1, dtype=np.int32)
        for segment, part in enumerate(self.parts(index)):
            size = part.stop - part.start
            inside = slice(part.offset, part.offset + size)
            ids[inside] = self._read(part.start, part.stop)
            segments[inside] = segment
            positions[inside] = np.arange(size)
            targets = self.corpus.read_mask(part.start + 1, part.stop)
            loss_mask[inside.start : inside.stop - 1] = targets
        segments[segments < 0] = segments.max() + 1  # the padding
        return Sample(
            ids[:-1],
            ids[1:],
            loss_mask=loss_mask,
            position_ids=positions[:-1] if self.config.reset_position_ids else None,
            segment_ids=segments[:-1],
        )
