"""All tokens of a corpus in windows, for evaluation: every token but the first is predicted exactly once.

    tokens     t0 t1 t2 t3 | t4 t5 t6 t7 | t8 t9           S = 4
    labels     t1 t2 t3 t4 | t5 t6 t7 t8 | t9 .. .. ..     the last window is padded, its padding masked

An index after the last window is a fully masked sample: a global batch may pass the end.
"""

from dataclasses import replace

import numpy as np

from nanotrain.data.batch import Sample
from nanotrain.data.gpt import GPTDataset


class AllWindows(GPTDataset):
    """The windows of tokens [start, stop) of a corpus, in file order."""

    @property
    def samples_per_epoch(self) -> int:
        """Windows, the last one padded."""
        return -(-max(0, self.stop - self.start - 1) // self.config.seq_length)

    def __getitem__(self, index: int) -> Sample:
        """Window `index` >= 0.

        Raises:
            DataError: the window holds a token id outside the vocabulary.
        """
        config, seq_length = self.config, self.config.seq_length
        first = min(self.start + index * seq_length, self.stop)
        last = min(first + seq_length + 1, self.stop)
        ids, count = np.zeros(0, dtype=np.int64), last - first
        if count:
            ids = self.corpus.read(first, last).astype(np.int64)
            self._check_vocabulary(ids, first)
        ids = np.pad(ids, (0, seq_length + 1 - count))
        sample = Sample(ids[:-1], ids[1:], loss_mask=np.ones(seq_length, dtype=np.float32))
        if config.reset_position_ids or config.reset_attention_mask or config.eod_mask_loss:
            starts = self.corpus.document_starts(first + 1, last) - first
            sample = self._with_documents(ids, starts)
        mask = sample.loss_mask.copy()
        mask[max(0, count - 1) :] = 0.0
        return replace(sample, loss_mask=mask)
