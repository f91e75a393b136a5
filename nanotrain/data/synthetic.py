"""Random tokens (`--mock-data`), a pure function of (seed, sample index), for benchmarks and tests."""

from dataclasses import dataclass

import numpy as np

from nanotrain.data.batch import Sample


@dataclass(frozen=True)
class SyntheticDataset:
    """Uniformly random tokens."""

    vocab_size: int  # tokens are in [0, vocab_size)
    seq_length: int  # S, tokens per sample
    seed: int  # key of the random generator

    @property
    def samples_per_epoch(self) -> int:
        """More than any run reads, so that the data never repeats."""
        return 1 << 62

    def __getitem__(self, index: int) -> Sample:
        """Sample `index`, at the same cost for any index: Philox is counter-based."""
        random = np.random.Generator(np.random.Philox(key=[self.seed, index]))
        ids = random.integers(0, self.vocab_size, self.seq_length + 1, dtype=np.int64)
        return Sample(tokens=ids[:-1], labels=ids[1:], loss_mask=np.ones(self.seq_length, dtype=np.float32))
