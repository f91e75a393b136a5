"""Tokens from nothing (`--mock-data`): a pure function of (seed, sample number), for benchmarks and tests."""

from dataclasses import dataclass

import numpy as np

from nanotrain.data.batch import Sample


@dataclass(frozen=True)
class SyntheticDataset:
    """Uniformly random tokens.

    Args:
        vocab_size: tokens lie in [0, vocab_size).
        seq_length: S, tokens of a sample.
        seed: chooses the tokens.
    """

    vocab_size: int
    seq_length: int
    seed: int

    @property
    def samples_per_epoch(self) -> int:
        """More than any run reads: the data never repeats."""
        return 1 << 62

    def __getitem__(self, sample_number: int) -> Sample:
        """The sample of that number; Philox is counter-based, so no number costs more than another."""
        random = np.random.Generator(np.random.Philox(key=[self.seed, sample_number]))
        ids = random.integers(0, self.vocab_size, self.seq_length + 1, dtype=np.int64)
        return Sample(tokens=ids[:-1], labels=ids[1:], loss_mask=np.ones(self.seq_length, dtype=np.float32))
