"""Windows equal slices of the concatenated stream; masks follow document boundaries."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanotrain.config.config import DataConfig
from nanotrain.data.gpt import AllWindows, GPTDataset, SyntheticDataset, permuted
from nanotrain.data.indexed import IndexedTokens
from nanotrain.errors import DataError
from nanotrain.prepare.token_writer import TokenWriter
from tests.data.conftest import WriteCorpus, random_documents


def _samples(
    prefix: Path,
    *,
    vocab_size: int,
    start: int = 0,
    stop: int | None = None,
    seed: int = 0,
    **options: Any,
) -> GPTDataset:
    corpus, config = IndexedTokens(prefix), DataConfig(**options)
    return GPTDataset(
        corpus,
        start,
        corpus.num_tokens if stop is None else stop,
        config,
        vocab_size=vocab_size,
        seed=seed,
    )


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=60,
    deadline=None,
)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=2, max_size=12).filter(lambda x: sum(x) > 8),
    data=st.data(),
)
def test_windows_are_slices_of_the_stream(
    write_corpus: WriteCorpus, lengths: list[int], data: st.DataObject
) -> None:
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


def test_every_epoch_reads_every_window_once_in_a_different_order(
    write_corpus: WriteCorpus,
) -> None:
    samples = _samples(write_corpus([np.arange(100)]), seq_length=7, vocab_size=100, seed=3)
    count = samples.samples_per_epoch
    epochs = [
        [int(samples[epoch * count + i].tokens[0]) for i in range(count)] for epoch in range(3)
    ]
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
    with pytest.raises(
        DataError, match=rf"token id {bad} at position 37 of .*corpus\.bin.*ids 0 to 63"
    ):
        samples[4]


@pytest.mark.parametrize("length", [2, 5, 9, 10])
def test_every_token_but_the_first_is_a_label_once(tmp_path: Path, length: int) -> None:
    with TokenWriter(tmp_path / "tokens", np.dtype(np.int32)) as writer:
        writer.add_documents([range(length)])
    windows = AllWindows(
        IndexedTokens(tmp_path / "tokens"), 0, length, DataConfig(seq_length=4), vocab_size=50
    )
    assert windows.samples_per_epoch == {2: 1, 5: 1, 9: 2, 10: 3}[length]
    samples = [windows[index] for index in range(windows.samples_per_epoch + 2)]
    labels = [sample.labels[sample.loss_mask > 0].tolist() for sample in samples]
    assert sum(labels, []) == list(range(1, length))
    assert all(sample.tokens.shape == (4,) for sample in samples) and labels[-2:] == [[], []]


def test_masks_of_documents_stay(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "tokens", np.dtype(np.int32)) as writer:
        for document in ([1, 2, 0], [3, 4, 5, 0]):
            writer.add_documents([document])
    config = DataConfig(seq_length=4, eod_mask_loss=True, reset_attention_mask=True)
    windows = AllWindows(IndexedTokens(tmp_path / "tokens"), 0, 7, config, vocab_size=50)
    first, second = windows[0], windows[1]
    assert first.loss_mask.tolist() == [1, 1, 0, 1] and second.loss_mask.tolist() == [1, 1, 0, 0]
    assert first.segment_ids is not None and first.segment_ids.tolist() == [0, 0, 0, 1]


KEYS = st.integers(0, 2**64 - 1)


@settings(deadline=None)
@given(size=st.integers(1, 400), seed=KEYS, epoch=st.integers(0, 1000))
def test_every_size_and_key_gives_a_bijection(size: int, seed: int, epoch: int) -> None:
    assert sorted(permuted(index, size, seed=seed, epoch=epoch) for index in range(size)) == list(
        range(size)
    )


@settings(deadline=None)
@given(size=st.integers(2**30, 2**60), data=st.data(), seed=KEYS)
def test_huge_sizes_stay_in_range_and_never_collide(
    size: int, data: st.DataObject, seed: int
) -> None:
    indices = data.draw(st.sets(st.integers(0, size - 1), max_size=20))
    images = {permuted(index, size, seed=seed, epoch=0) for index in indices}
    assert len(images) == len(indices)
    assert all(0 <= image < size for image in images)


def test_epochs_and_seeds_have_different_orders() -> None:
    orders = {
        tuple(permuted(index, 50, seed=seed, epoch=epoch) for index in range(50))
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16


def test_the_order_does_not_change_between_versions() -> None:
    # A run that resumes under a newer nanotrain must go on with the same data.
    assert [permuted(index, 1000, seed=1234, epoch=3) for index in range(6)] == [
        529,
        905,
        47,
        504,
        990,
        313,
    ]


def test_images_are_spread_evenly() -> None:
    # Mean image of each tenth of the indices, against the standard error of a random order.
    size = 10_000
    images = np.array([permuted(index, size, seed=5, epoch=0) for index in range(size)]).reshape(
        10, -1
    )
    standard_error = size / np.sqrt(12) / np.sqrt(size / 10)
    assert np.all(np.abs(images.mean(axis=1) - size / 2) < 4 * standard_error)
    correlation = np.corrcoef(images.ravel()[:-1], images.ravel()[1:])[0, 1]
    assert abs(correlation) < 0.04


def test_a_sample_depends_on_seed_and_number_only() -> None:
    samples = SyntheticDataset(vocab_size=50, seq_length=16, seed=1)
    assert np.array_equal(samples[10**15].tokens, SyntheticDataset(50, 16, 1)[10**15].tokens)
    assert not np.array_equal(samples[3].tokens, samples[4].tokens)
    assert not np.array_equal(samples[3].tokens, SyntheticDataset(50, 16, 2)[3].tokens)


def test_tokens_fill_the_vocabulary_and_labels_follow() -> None:
    samples = SyntheticDataset(vocab_size=50, seq_length=4000, seed=1)
    assert set(samples[0].tokens.tolist()) == set(range(50))
    assert np.array_equal(samples[0].tokens[1:], samples[0].labels[:-1])


@pytest.mark.parametrize("seq_length", [1, 3, 5, 18])
def test_no_token_of_an_excluded_document_is_read_or_is_a_target(
    write_corpus: WriteCorpus, seq_length: int
) -> None:
    """The first one too, which the document before predicts; nothing else changes."""
    lengths, excluded = [5, 1, 3, 6, 4], [1, 3]
    prefix = write_corpus(random_documents(lengths))
    whole = _samples(prefix, seq_length=seq_length, vocab_size=100, shuffle=False)
    without = replace(whole, excluded=frozenset(excluded))
    corpus = whole.corpus
    owner = np.repeat(np.arange(len(lengths)), lengths)
    is_excluded = np.isin(owner, excluded)
    ends = np.repeat([corpus.read(end - 1, end)[0] for end in np.cumsum(lengths)], lengths)
    for index in range(whole.samples_per_epoch):
        inputs = slice(index * seq_length, (index + 1) * seq_length)
        labels = slice(inputs.start + 1, inputs.stop + 1)
        sample, full = without[index], whole[index]
        assert sample.loss_mask.tolist() == (full.loss_mask * ~is_excluded[labels]).tolist()
        for part, ours, theirs in (
            (inputs, sample.tokens, full.tokens),
            (labels, sample.labels, full.labels),
        ):
            assert np.array_equal(ours, np.where(is_excluded[part], ends[part], theirs))
