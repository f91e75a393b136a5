"""Synthetic samples are a pure function of seed and number, within the vocabulary."""

import numpy as np

from nanotrain.data.synthetic import SyntheticDataset


def test_a_sample_depends_on_seed_and_number_only() -> None:
    samples = SyntheticDataset(vocab_size=50, seq_length=16, seed=1)
    assert np.array_equal(samples[10**15].tokens, SyntheticDataset(50, 16, 1)[10**15].tokens)
    assert not np.array_equal(samples[3].tokens, samples[4].tokens)
    assert not np.array_equal(samples[3].tokens, SyntheticDataset(50, 16, 2)[3].tokens)


def test_tokens_fill_the_vocabulary_and_labels_follow() -> None:
    samples = SyntheticDataset(vocab_size=50, seq_length=4000, seed=1)
    assert set(samples[0].tokens.tolist()) == set(range(50))
    assert np.array_equal(samples[0].tokens[1:], samples[0].labels[:-1])
