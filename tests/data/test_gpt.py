"""Windows equal slices of the concatenated stream; masks follow document boundaries."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanotrain.data.gpt import GPTDataset, GPTDatasetConfig
from nanotrain.data.indexed import IndexedTokens
from nanotrain.errors import DataError
from tests.data.conftest import WriteCorpus, random_documents


def _samples(prefix: object, *, start: int = 0, stop: int | None = None, **options: object) -> GPTDataset:
    corpus = IndexedTokens(prefix)  # type: ignore[arg-type]
    return GPTDataset(corpus, start, corpus.num_tokens if stop is None else stop, GPTDatasetConfig(**options))  # type: ignore[arg-type]


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=60, deadline=None
)
@given(lengths=st.lists(st.integers(0, 12), min_size=2, max_size=12).filter(lambda x: sum(x) > 8), data=st.data())
def test_windows_are_slices_of_the_stream(write_corpus: WriteCorpus, lengths: list[int], data: st.DataObject) -> None:
    seq_length = data.draw(st.integers(1, 7))
    start = data.draw(st.integers(0, sum(lengths) - seq_length - 1))
    stop = data.draw(st.integers(start + seq_length + 1, sum(lengths)))
    samples = _samples(
        write_corpus(random_documents(lengths)), start=start, stop=stop,
        seq_length=seq_length, vocab_size=100, shuffle=False, reset_position_ids=True, reset_attention_mask=True,
        eod_mask_loss=True,
    )  # fmt: skip
    stream = np.concatenate(random_documents(lengths))[start:stop]
    owner = np.repeat(np.arange(len(lengths)), lengths)[start:stop]
    assert samples.samples_per_epoch == (len(stream) - 1) // seq_length
    for number in range(samples.samples_per_epoch):
        sample, window = samples[number], slice(number * seq_length, (number + 1) * seq_length)
        behind = slice(window.start + 1, window.stop + 1)
        assert sample.tokens.tolist() == stream[window].tolist()
        assert sample.labels.tolist() == stream[behind].tolist()
        assert sample.loss_mask.tolist() == (owner[window] == owner[behind]).astype(float).tolist()
        same = sample.segment_ids[:, None] == sample.segment_ids[None, :]
        assert np.array_equal(same, owner[window][:, None] == owner[window][None, :])
        first = [int(np.argmax(owner[window] == document)) for document in owner[window]]
        assert sample.position_ids.tolist() == (np.arange(seq_length) - first).tolist()


def test_every_epoch_reads_every_window_once_in_a_different_order(write_corpus: WriteCorpus) -> None:
    samples = _samples(write_corpus([np.arange(100)]), seq_length=7, vocab_size=100, seed=3)
    count = samples.samples_per_epoch
    epochs = [[int(samples[epoch * count + i].tokens[0]) for i in range(count)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(0, 7 * count, 7)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_plain_order_repeats_after_an_epoch(write_corpus: WriteCorpus) -> None:
    samples = _samples(write_corpus([np.arange(100)]), seq_length=9, vocab_size=100, shuffle=False)
    assert samples.samples_per_epoch == 11
    assert samples[13].tokens.tolist() == samples[2].tokens.tolist() == list(range(18, 27))


def test_without_document_options_positions_are_none(write_corpus: WriteCorpus) -> None:
    sample = _samples(write_corpus([np.arange(20)]), seq_length=4, vocab_size=100)[0]
    assert sample.position_ids is None
    assert sample.segment_ids is None
    assert sample.loss_mask.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(("dtype", "bad"), [("uint16", 64), ("int32", -1)])
def test_an_id_outside_the_vocabulary_is_named_with_its_position_and_file(
    write_corpus: WriteCorpus, dtype: str, bad: int
) -> None:
    ids = np.arange(64)
    ids[37] = bad
    samples = _samples(write_corpus([ids], dtype=dtype), seq_length=8, vocab_size=64, shuffle=False)
    assert samples[3].tokens[-1] == 31
    with pytest.raises(DataError, match=rf"token id {bad} at position 37 of .*corpus\.bin.*ids 0 to 63"):
        samples[4]
