"""Every token but the first of a document is a target once per epoch, and no document is read
beside another.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.config.config import DataConfig
from nanotrain.config.load import load
from nanotrain.data.gpt import GPTDataset
from nanotrain.data.indexed import IndexedTokens
from nanotrain.data.packing import PackedDataset, best_fit
from nanotrain.errors import NanotrainError
from nanotrain.prepare.token_writer import TokenWriter
from tests.data.conftest import random_documents, write_documents

LENGTHS = (3, 40, 0, 17, 90, 5, 61, 1, 9, 9, 8, 2)
VOCAB_SIZE = 9000


@pytest.fixture(scope="module", params=[4, 8, 64])
def dataset(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> PackedDataset:
    # given tokens that are all different, so that each can be counted
    tokens, documents = iter(np.random.default_rng(0).permutation(VOCAB_SIZE)), []
    for length in LENGTHS:
        documents.append(np.array([next(tokens) for _ in range(length)], dtype=np.int64))
    prefix = write_documents(tmp_path_factory.mktemp("packing") / "corpus", documents)
    config = DataConfig(seq_length=request.param, reset_position_ids=True, packing="best_fit")
    corpus = IndexedTokens(prefix)
    return PackedDataset(corpus, 0, corpus.num_tokens, config, vocab_size=VOCAB_SIZE)


def test_every_token_but_the_first_of_a_document_is_a_target_once(dataset: PackedDataset) -> None:
    corpus, counted = dataset.corpus, Counter()
    for index in range(dataset.samples_per_epoch):
        sample = dataset[index]
        for place in np.flatnonzero(sample.loss_mask).tolist():
            pair = int(sample.tokens[place]), int(sample.labels[place])
            counted[pair] += 1
    expected = Counter()
    for document in range(corpus.num_documents):
        start, stop = corpus.document_start(document), corpus.document_start(document + 1)
        ids = corpus.read(start, stop).tolist() if stop > start else []
        expected.update(zip(ids, ids[1:], strict=False))
    assert counted == expected and set(counted.values()) == {1}


def test_targets_are_those_of_the_mask_of_the_corpus(tmp_path: Path) -> None:
    """Of documents whose masks say of each token whether it is a target."""
    draw = np.random.default_rng(1)
    ids = iter(draw.permutation(VOCAB_SIZE))
    is_target: dict[int, bool] = {}
    with TokenWriter(tmp_path / "masked", np.dtype("uint16"), has_mask=True) as writer:
        for length in LENGTHS:
            document = [int(next(ids)) for _ in range(length)]
            mask = draw.random(length) < 0.5
            writer.add_documents([document], masks=[mask.astype(np.uint8)])
            is_target |= dict(zip(document, mask.tolist(), strict=True))
            is_target |= dict.fromkeys(document[:1], False)  # nothing predicts the first token
    corpus = IndexedTokens(tmp_path / "masked")
    for seq_length in (4, 8, 64):
        config = DataConfig(seq_length=seq_length, packing="best_fit")
        packed = PackedDataset(corpus, 0, corpus.num_tokens, config, vocab_size=VOCAB_SIZE)
        counted: Counter[int] = Counter()
        for index in range(packed.samples_per_epoch):
            sample = packed[index]
            counted.update(sample.labels[sample.loss_mask > 0].tolist())
        assert counted == Counter(token for token, target in is_target.items() if target)


@pytest.mark.parametrize(("length", "num_samples"), [(9, 1), (10, 2), (17, 2), (18, 3), (1, 1)])
def test_a_document_has_no_more_pieces_than_its_targets_need(
    tmp_path: Path, length: int, num_samples: int
) -> None:
    """A sample of S + 1 = 9 tokens has 8 targets, so a document of L tokens needs (L - 1) / 8."""
    ids = np.arange(length)
    prefix = write_documents(tmp_path / "corpus", [ids, ids + 100])
    corpus = IndexedTokens(prefix)
    config = DataConfig(seq_length=8, packing="best_fit")
    packed = PackedDataset(corpus, 0, corpus.num_tokens, config, vocab_size=VOCAB_SIZE)
    pieces = [part for index in range(packed.samples_per_epoch) for part in packed.parts(index)]
    assert len(pieces) == 2 * num_samples
    targets = sum(int(packed[index].loss_mask.sum()) for index in range(packed.samples_per_epoch))
    assert targets == 2 * (length - 1)


def test_a_token_attends_to_its_document_from_its_start_on(dataset: PackedDataset) -> None:
    for index in range(dataset.samples_per_epoch):
        sample, length = dataset[index], dataset.config.seq_length
        covered = np.zeros(length + 1, dtype=bool)
        for number, part in enumerate(dataset.parts(index)):
            inside = slice(part.offset, min(length, part.offset + part.stop - part.start))
            assert (sample.segment_ids[inside] == number).all()
            assert sample.position_ids[inside].tolist() == list(range(inside.stop - inside.start))
            covered[part.offset : part.offset + part.stop - part.start] = True
        padding = ~covered[:-1]
        assert not sample.loss_mask[padding].any()
        assert not np.isin(sample.segment_ids[padding], sample.segment_ids[~padding]).any()


def test_an_excluded_document_is_masked(dataset: PackedDataset) -> None:
    without = replace(dataset, excluded=frozenset({4}))
    corpus = dataset.corpus
    hidden = set(corpus.read(corpus.document_start(4), corpus.document_start(5) - 1).tolist())
    for index in range(without.samples_per_epoch):
        before, after = dataset[index], without[index]
        assert not hidden.intersection(after.tokens.tolist())
        kept = ~np.isin(
            before.labels,
            [*hidden, corpus.read(corpus.document_start(5) - 1, corpus.document_start(5))[0]],
        )
        assert (after.loss_mask == before.loss_mask * kept).all()


def test_epochs_are_shuffled(dataset: PackedDataset) -> None:
    number = dataset.samples_per_epoch
    for epoch in range(2):
        windows = [dataset.window(index) for index in range(epoch * number, (epoch + 1) * number)]
        assert sorted(windows) == list(range(number))
    assert number < 3 or [dataset.window(i) for i in range(number)] != [
        dataset.window(number + i) for i in range(number)
    ]


@given(st.lists(st.integers(min_value=1, max_value=30), max_size=60))
def test_bins_hold_their_pieces_and_are_few(lengths: list[int]) -> None:
    bins = best_fit(np.array(lengths, dtype=np.int64), 30)
    fill = np.bincount(bins, weights=lengths) if lengths else np.zeros(0)
    assert (fill <= 30).all() and (fill > 0).all()
    assert len(fill) <= 1.5 * -(-sum(lengths) // 30) + 1 or (np.sort(fill)[:2].sum() > 30)


def test_many_documents_fill_their_samples() -> None:
    lengths = np.random.default_rng(0).integers(1, 2048, 20_000)
    bins = best_fit(lengths, 2049)
    assert np.bincount(bins, weights=lengths).mean() > 0.99 * 2049


def test_packing_without_masked_attention_is_refused(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "corpus", random_documents([30, 40]))
    line = ["+config=tiny", "--train-data-path", str(prefix), "--packing", "best_fit"]
    with pytest.raises(NanotrainError, match="packing best_fit without reset_attention_mask"):
        load(line)
    assert load([*line, "--reset-attention-mask"]).config.data.packing == "best_fit"


def test_the_samples_of_a_document_are_those_that_hold_one_of_its_tokens(
    dataset: PackedDataset,
) -> None:
    """Of packed documents, and of windows that cut them."""
    corpus, length = dataset.corpus, dataset.config.seq_length
    plain = GPTDataset(corpus, 2, corpus.num_tokens - 3, dataset.config, vocab_size=VOCAB_SIZE)
    for samples in (dataset, plain):
        found: dict[int, list[int]] = {}
        for index in range(samples.samples_per_epoch):
            window = samples.window(index)
            for part in samples.parts(index):
                if part.offset < length and part.stop > part.start:
                    found.setdefault(part.document, []).append(window)
        for document in range(corpus.num_documents):
            assert list(samples.windows_with(document)) == sorted(found.get(document, []))
