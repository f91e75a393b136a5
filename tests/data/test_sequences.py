"""Samples split into shorter sequences."""

import numpy as np
import torch

from nanotrain.config.batch_schedule import read_steps
from nanotrain.data.batch import Batch, Sample
from nanotrain.data.loader import GlobalBatchLoader
from nanotrain.data.sampler import SamplerConfig
from nanotrain.data.sequences import split_sequences


class Places:
    """Token i of the data is i; each sample has the eight after those of the one before."""

    samples_per_epoch = 1000

    def __getitem__(self, index: int) -> Sample:
        stream = np.arange(8 * index, 8 * index + 9)
        return Sample(stream[:-1], stream[1:], loss_mask=np.ones(8, dtype=np.float32))


def test_all_ranks_together_read_every_token_once_through_a_change_of_length() -> None:
    lengths = read_steps(["0:2", "90:4", "140:8"], seq_length=8)
    tokens, shapes = [], []
    for rank in range(2):
        sampler = SamplerConfig(rank, 2, micro_batch_size=1, global_batch_size=6, lengths=lengths)
        loader = GlobalBatchLoader(Places(), sampler=sampler)
        for microbatches in (next(loader) for _ in range(4)):
            for batch in microbatches:
                assert torch.equal(batch.labels, batch.tokens + 1), "a sequence ends with the first token of the next"
                tokens += batch.tokens.flatten().tolist()
            shapes.append(tuple(microbatches[0].tokens.shape))
    assert sorted(tokens) == [*range(4 * 6 * 8)]
    assert shapes == 2 * [(4, 2), (4, 2), (2, 4), (1, 8)]


def test_positions_restart_with_a_sequence_and_with_a_document() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0], [0, 0, 1, 2, 3, 4, 0, 1]])
    segments = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1, 2, 2]], dtype=torch.int32)
    numbers = torch.arange(16).reshape(2, 8)
    batch = Batch(numbers, numbers, numbers.float(), positions.clone(), segments, torch.tensor([3, ~3]))
    split = split_sequences(batch, 4)
    assert split.position_ids is not None and split.segment_ids is not None and split.sample_ids is not None
    assert split.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 0], [0, 0, 1, 2], [0, 1, 0, 1]]
    assert split.segment_ids.tolist() == [[0, 0, 0, 0], [1, 1, 1, 2], [0, 1, 1, 1], [1, 1, 2, 2]]
    assert len(set(split.sample_ids.tolist())) == 4, "each sequence has dropout of its own"
    assert split.sample_ids[[0, 2]].tolist() == [3, ~3]


def test_the_corpus_of_a_sample_is_that_of_its_sequences() -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    batch = Batch(tokens, tokens, tokens.float(), source_ids=torch.tensor([5, 7]))
    split = split_sequences(batch, 2)
    assert split.source_ids is not None and split.source_ids.tolist() == [5, 5, 5, 5, 7, 7, 7, 7]
    assert split_sequences(batch, 8) is split_sequences(batch, None) is batch
