"""From the data section to samples, and the errors that must show before a device is touched."""

from pathlib import Path

import numpy as np
import pytest

from nanotrain.config.config import DataConfig
from nanotrain.data.blend import BlendedDataset
from nanotrain.data.build import build_data
from nanotrain.data.corpus_info import CorpusInfo, write_info
from nanotrain.data.run_tokenizer import tokenizer_of, uses_quickstart
from nanotrain.errors import DataError
from tests.data.conftest import WriteCorpus, random_documents
from tests.laws.megatron_file import write_tokens


def test_splits_read_their_own_documents_only(write_corpus: WriteCorpus) -> None:
    prefix = write_corpus([np.full(40, document) for document in range(10)])
    data = DataConfig(data_path=[str(prefix)], split="8,1,1", seq_length=16)
    built = build_data(data, vocab_size=10, seed=1)
    for samples, documents in ((built.train, set(range(8))), (built.valid, {8}), (built.test, {9})):
        read = {int(token) for i in range(samples.samples_per_epoch) for token in samples[i].tokens}
        assert read == documents


def test_everything_for_training_in_plain_order(write_corpus: WriteCorpus) -> None:
    documents = random_documents([33, 50, 20])
    data = DataConfig(
        data_path=[str(write_corpus(documents))], split="1,0,0", seq_length=8, shuffle=False
    )
    built = build_data(data, vocab_size=100, seed=1, required=["train"])
    assert built.valid is None
    assert built.test is None
    assert built.train[5].labels.tolist() == np.concatenate(documents)[41:49].tolist()


def test_corpora_blend_by_weight_or_by_size(write_corpus: WriteCorpus) -> None:
    small = write_corpus([np.full(161, 1)], name="small")
    large = write_corpus([np.full(641, 2)], name="large")
    for path, share in ((["1", str(small), "1", str(large)], 0.5), ([str(small), str(large)], 0.2)):
        data = DataConfig(data_path=path, split="1", seq_length=16)
        train = build_data(data, vocab_size=10, seed=1, required=["train"]).train
        assert isinstance(train, BlendedDataset)
        firsts = [int(train[number].tokens[0]) for number in range(50)]
        assert firsts.count(1) == 50 * share, path


def test_order_is_the_seeds(write_corpus: WriteCorpus) -> None:
    data = DataConfig(data_path=[str(write_corpus([np.arange(500)]))], split="1", seq_length=4)
    orders = [
        [
            int(build_data(data, vocab_size=500, seed=seed, required=["train"]).train[i].tokens[0])
            for i in range(20)
        ]
        for seed in (1, 1, 2)
    ]
    assert orders[0] == orders[1] != orders[2]


def test_mock_data_needs_no_files_and_its_splits_differ() -> None:
    built = build_data(DataConfig(mock_data=True, seq_length=8), vocab_size=99, seed=1)
    assert built.train[0].tokens.max() < 99
    assert not np.array_equal(built.train[0].tokens, built.valid[0].tokens)


def test_too_few_tokens_are_an_error_with_numbers_and_a_cure(write_corpus: WriteCorpus) -> None:
    prefix = write_corpus(random_documents([10] * 10))
    data = DataConfig(data_path=[str(prefix)], split="8,2,0", seq_length=20)
    with pytest.raises(
        DataError,
        match=r"valid split .* has 20 tokens.*seq_length \+ 1 = 21.*10 documents.*--eval-interval 0",
    ):
        build_data(data, vocab_size=100, seed=1)
    assert build_data(data, vocab_size=100, seed=1, required=["train"]).valid is None


def test_one_document_is_not_divided_and_its_cure_is_more_documents(
    write_corpus: WriteCorpus,
) -> None:
    data = DataConfig(
        data_path=[str(write_corpus(random_documents([900])))], seq_length=8, split="90,10"
    )
    with pytest.raises(DataError) as caught:
        build_data(data, vocab_size=1000, seed=0, required={"train", "valid"})
    assert "valid split" in str(caught.value) and "has 0 tokens" in str(caught.value)
    assert (
        caught.value.fix
        == "prepare the text as several documents, or turn validation off with --eval-interval 0"
    )


def test_a_corpus_that_is_not_divided_gets_no_advice_on_split(write_corpus: WriteCorpus) -> None:
    long, short = (
        str(write_corpus([np.zeros(size)], name=name))
        for name, size in (("long", 40), ("short", 5))
    )
    for data, cure in (
        (
            DataConfig(train_data_path=[long], valid_data_path=[short], seq_length=16),
            "give a longer corpus, or turn",
        ),
        (DataConfig(data_path=[short], split="1", seq_length=16), "give a longer corpus, or lower"),
    ):
        required = ["train", "valid"] if data.valid_data_path else ["train"]
        with pytest.raises(DataError, match=f"short has 5 tokens.*{cure}") as caught:
            build_data(data, vocab_size=10, seed=1, required=required)
        assert "--split" not in str(caught.value)


def test_a_corpus_of_another_vocabulary_is_refused_at_once(write_corpus: WriteCorpus) -> None:
    data = DataConfig(data_path=[str(write_corpus([np.full(100, 70)]))], split="1", seq_length=20)
    with pytest.raises(DataError, match="token id 70"):
        build_data(data, vocab_size=64, seed=1, required=["train"])


def test_the_tokenizer_asked_for_goes_before_the_one_beside_the_data(tmp_path: Path) -> None:
    write_info(tmp_path / "a", CorpusInfo("bytes", 257, 256))
    assert tokenizer_of(DataConfig(data_path=[str(tmp_path / "a")])) == "bytes"
    assert (
        tokenizer_of(DataConfig(data_path=[str(tmp_path / "a")], tokenizer_model="gpt2")) == "gpt2"
    )
    assert tokenizer_of(DataConfig(data_path=[str(tmp_path / "b")])) is None


def test_the_quick_start_is_for_runs_without_data() -> None:
    assert uses_quickstart(DataConfig())
    assert not uses_quickstart(DataConfig(mock_data=True))
    assert not uses_quickstart(DataConfig(data_path=["a"]))


def test_a_named_validation_set_with_tokens_outside_the_vocabulary_is_an_error(tmp_path):
    write_tokens(tmp_path / "train", np.arange(200, dtype=np.uint16) % 50)
    write_tokens(tmp_path / "valid", np.full(200, 99, dtype=np.uint16))
    data = DataConfig(
        data_path=[str(tmp_path / "train")],
        valid_data_path=[f"v={tmp_path / 'valid'}"],
        split="1,0,0",
        seq_length=8,
    )
    with pytest.raises(DataError, match="token id 99"):
        build_data(data, vocab_size=50, seed=1)
