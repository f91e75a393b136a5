"""Where changed data begins: the record of it, and the samples after it."""

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from nanotrain.config.config import DataConfig
from nanotrain.data.blend import BlendedDataset
from nanotrain.data.gpt import GPTDataset
from nanotrain.data.indexed import IndexedTokens
from nanotrain.data.origin import DataOrigin, continued
from tests.data.conftest import WriteCorpus


@pytest.fixture
def corpora(write_corpus: WriteCorpus) -> dict[str, GPTDataset]:
    datasets = {}
    for seed, name in enumerate(("a", "b")):
        tokens = np.random.default_rng(seed).integers(0, 100, 999)
        corpus = IndexedTokens(write_corpus([tokens], name=name))
        config = DataConfig(seq_length=8)
        datasets[name] = GPTDataset(corpus, 0, corpus.num_tokens, config, vocab_size=100)
    return datasets


def prefix_of(dataset: GPTDataset) -> str:
    return str(dataset.corpus.prefix)


def test_an_origin_is_the_same_after_its_record() -> None:
    origin = DataOrigin(12, {"a": 3, "b": 9}, {"old": "a"})
    assert DataOrigin.from_json(json.loads(json.dumps(origin.to_json()))) == origin
    assert DataOrigin.from_json({"sample": 0, "read": {}}) == DataOrigin(0, {}), "no corpus moved"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (5, "origin"),
        ({"sample": -1, "read": {}}, "origin.sample"),
        ({"sample": 1}, "origin.read"),
        ({"sample": 1, "read": {"a": 0.5}}, "origin.read"),
        ({"sample": 1, "read": {}, "moved": {"a": 1}}, "origin.moved"),
    ],
)
def test_a_record_that_is_damaged_names_its_field(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataOrigin.from_json(value)


def test_without_an_origin_samples_are_as_they_were(corpora: dict[str, GPTDataset]) -> None:
    assert continued(corpora["a"], None) is corpora["a"]


def test_a_corpus_goes_on_where_it_stopped_and_a_new_one_begins(
    corpora: dict[str, GPTDataset], tmp_path: Path
) -> None:
    a, b = corpora["a"], corpora["b"]
    blend = BlendedDataset.by_weight([a, b], [Fraction(1), Fraction(1)])
    samples = continued(blend, DataOrigin(10, {prefix_of(a): 7, "gone": 5}))
    own: dict[int, list[int]] = {0: [], 1: []}
    for index in range(10, 30):
        source, sample = samples.locate(index)
        own[source].append(sample)
    assert own[0] == list(range(7, 17)) and own[1] == list(range(10))
    single = continued(a, DataOrigin(4, {prefix_of(a): 9}))
    for index in range(4, 12):
        expected = a[index - 4 + 9]
        assert np.array_equal(single[index].tokens, expected.tokens)
