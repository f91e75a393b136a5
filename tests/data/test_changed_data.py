"""How a corpus goes on in another order: the sample, and the tokens that are read twice or never."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nanotrain.config.config import DataConfig
from nanotrain.data import changed_data
from nanotrain.data.changed_data import changed_order, continue_corpus
from nanotrain.data.gpt import GPTDataset
from nanotrain.data.indexed import IndexedTokens
from nanotrain.data.recorded_data import CorpusOrder, CorpusRecord
from tests.data.conftest import WriteCorpus


@pytest.fixture
def part(write_corpus: WriteCorpus) -> GPTDataset:
    """100 samples of 8 tokens, shuffled."""
    corpus = IndexedTokens(write_corpus([np.arange(801) % 50]))
    return GPTDataset(corpus, 0, 801, DataConfig(seq_length=8), vocab_size=50, seed=3)


def record(part: GPTDataset, read: int) -> CorpusRecord:
    corpus = part.corpus
    return CorpusRecord(str(corpus.prefix), corpus.fingerprint, read, CorpusOrder.of(part))


def windows(part: GPTDataset, samples: range) -> set[int]:
    return {part.window(sample) for sample in samples}


def test_the_same_order_goes_on_and_a_new_corpus_starts(part: GPTDataset) -> None:
    found = continue_corpus(record(part, 130), part)
    assert found.read == 130 and found.is_exact
    assert "sample 30 of 100 samples of its epoch 2, where it stopped" in found.text
    new = continue_corpus(None, part)
    assert new.read == 0 and new.is_exact and "is new" in new.text


@pytest.mark.parametrize("read", [0, 1, 30, 99, 100, 130])
def test_another_seed_reads_some_samples_twice_and_some_never(part: GPTDataset, read: int) -> None:
    other = replace(part, seed=4)
    found = continue_corpus(record(part, read), other)
    epoch = 100 * (read // 100)
    done = windows(part, range(epoch, read))
    rest = windows(other, range(read, epoch + 100)) if done else set()
    assert found.read == read
    assert found.overlap.repeated == 8 * len(done & rest)
    assert found.overlap.left_out == (8 * len(set(range(100)) - done - rest) if done else 0)
    assert found.is_exact == (not done & rest)


def test_the_overlap_of_a_large_corpus_is_an_expected_value(
    part: GPTDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changed_data, "MAX_COUNTED", 0)
    found = continue_corpus(record(part, 25), replace(part, seed=4))
    assert found.overlap.repeated == found.overlap.left_out == round(801 * 0.25 * 0.75)
    assert "about 150 tokens of this epoch are read again and about 150 are left out" in found.text


def test_changed_settings_are_named_with_both_values() -> None:
    before = {"data_path": ["a"], "seed": 1, "split": "1"}
    assert changed_order(before, {"data_path": [], "seed": 2, "split": "1"}) == [
        "data_path a -> none",
        "seed 1 -> 2",
    ]


@pytest.mark.parametrize("samples", [7, 100, 250])
def test_a_position_in_another_order_is_the_nearest_part_of_its_epoch(samples: int) -> None:
    old = CorpusOrder(start=0, stop=801, samples=100, seq_length=8, packing="stream", seed=3)
    new = replace(old, samples=samples, seed=4)
    for read in range(350):
        position = changed_data._position(CorpusRecord("a", "f", read, old), new)
        epochs, done = divmod(read, 100)
        assert abs(position - epochs * samples - done * samples / 100) <= 0.5, read


def test_every_corpus_is_named_that_goes_on_or_is_not_read_any_more(
    part: GPTDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changed_data, "corpora_of", lambda dataset: [part])
    kept = record(part, 30)
    gone = [replace(kept, prefix=f"/gone/{n}", fingerprint=f"{n}") for n in range(2)]
    saved: Any = SimpleNamespace(corpora=[gone[0], kept, gone[1]], settings={}, sample=90, valid=[])
    splits: Any = SimpleNamespace(train=part)
    lines = changed_data.go_on(saved, splits, settings={}, validates=False, is_allowed=False).lines
    for prefix in (str(part.corpus.prefix), "/gone/0", "/gone/1"):
        assert sum(prefix in line for line in lines) == 1, lines
