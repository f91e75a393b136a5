"""Samples of whole documents (`--packing best_fit`): for conversations, where half a document
teaches little.

    documents      aaaaaaa   bbb   cc   dddddddddddd          S = 8, so a sample has S + 1 tokens
    pieces         aaaaaaa   bbb   cc   ddddddddd  dddd       longer ones are divided; the last token is read again
    samples        aaaaaaacc | bbbdddd.. | ddddddddd          every piece in the fullest sample that has space

A token attends to its document alone and no document is predicted from another, so every token but
the first of a document is a target once per epoch. The rest of a sample is padding, which is
masked. Opening takes time and memory in proportion to the number of documents: 4 s and 25 MB per
million (measured).

Source: Ding et al. 2024, "Fewer Truncations Improve Language Modeling" (best-fit decreasing).
"""

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from nanotrain.data.batch import Sample
from nanotrain.data.gpt import GPTDataset, Part


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The bin of every piece: by descending length, each in the bin with the least space that is
    enough.

    >>> best_fit(np.array([7, 3, 2, 9, 4]), 9).tolist()
    [1, 2, 2, 0, 2]
    """
    bins = np.empty(len(lengths), dtype=np.int64)
    with_space: list[list[int]] = [[] for _ in range(capacity + 1)]  # bins by space
    spaces, num_bins = 0, 0  # a bit for every space that some bin has
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            number = with_space[space].pop()
            if not with_space[space]:
                spaces ^= 1 << space
        else:
            space, number, num_bins = capacity, num_bins, num_bins + 1
        bins[piece] = number
        if left := space - length:
            with_space[left].append(number)
            spaces |= 1 << left
    return bins


class PackedDataset(GPTDataset):
    """Samples of whole documents from a range of documents of a corpus."""

    @cached_property
    def _packs(self) -> tuple[np.ndarray, np.ndarray]:
        """[pieces, 3] document, first and last token of the stream, sample by sample; and [samples
        + 1] their ends.
        """
        length, pieces = self.config.seq_length, []
        for document, start, stop in self.corpus.documents_in(self.start, self.stop):
            # the last token of a piece is the first of the next, which it predicts from
            pieces += [
                (document, at, min(at + length + 1, stop))
                for at in range(start, max(stop - 1, start + 1), length)
            ]
        table = np.array(pieces, dtype=np.int64).reshape(-1, 3)
        bins = best_fit(table[:, 2] - table[:, 1], length + 1)
        order = np.argsort(bins, kind="stable")
        return table[order], np.searchsorted(bins[order], np.arange(bins.max(initial=-1) + 2))

    @property
    def samples_per_epoch(self) -> int:
        """Samples per pass over the documents."""
        return len(self._packs[1]) - 1

    def parts(self, index: int) -> Iterator[Part]:
        """The documents in the S + 1 tokens of a sample, in order."""
        return self._parts_of(self.window(index))

    def _parts_of(self, window: int) -> Iterator[Part]:
        (pieces, ends), place = self._packs, 0
        for document, start, stop in pieces[ends[window] : ends[window + 1]].tolist():
            yield Part(document, start, stop, place)
            place += stop - start

    def windows_with(self, document: int) -> list[int]:
        """The samples of an epoch whose first S tokens hold a token of a document."""
        pieces, ends = self._packs
        windows = np.unique(
            np.searchsorted(ends, np.flatnonzero(pieces[:, 0] == document), side="right") - 1
        ).tolist()
        length = self.config.seq_length
        return [
            w
            for w in windows
            if any(part[0] == document and part.place < length for part in self._parts_of(w))
        ]

    def num_tokens(self, before: int, after: int) -> int:
        """Tokens of documents in the first S tokens of samples [before, after)."""
        pieces, ends = self._packs
        sizes = np.add.reduceat(pieces[:, 2] - pieces[:, 1], ends[:-1])
        return sum(
            min(int(sizes[self.window(index)]), self.config.seq_length)
            for index in range(before, after)
        )

    def _read_sample(self, index: int) -> Sample:
        length = self.config.seq_length
        ids, loss_mask = np.zeros(length + 1, dtype=np.int64), np.zeros(length, dtype=np.float32)
        positions, segments = np.arange(length + 1), np.full(length + 1, -1, dtype=np.int32)
        for number, part in enumerate(self.parts(index)):
            inside = slice(part.place, part.place + part.stop - part.start)
            ids[inside], segments[inside] = self._read(part.start, part.stop), number
            positions[inside] = np.arange(part.stop - part.start)
            loss_mask[inside.start : inside.stop - 1] = self.corpus.read_mask(
                part.start + 1, part.stop
            )
        segments[segments < 0] = segments.max() + 1  # the padding
        return Sample(
            ids[:-1],
            ids[1:],
            loss_mask=loss_mask,
            position_ids=positions[:-1] if self.config.reset_position_ids else None,
            segment_ids=segments[:-1],
        )
