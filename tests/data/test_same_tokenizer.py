"""Corpora of different tokenizers are refused, and a model is evaluated on its own tokens."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from nanotrain.config.config import DataConfig
from nanotrain.data.build import build_data
from nanotrain.data.corpus_info import CorpusInfo, tokenizer_path, write_info
from nanotrain.data.same_tokenizer import is_same_tokenizer, require_tokenizer_of
from nanotrain.data.tokenizer import load_tokenizer
from nanotrain.errors import ConfigError
from tests.data.conftest import WriteCorpus
from tests.interop.hf.tiny_tokenizers import write_tokenizer as write_kind


def write_tokenizer(prefix: Path, *, vocab: dict[str, int], **stages: object) -> None:
    folder = tokenizer_path(prefix)
    folder.mkdir()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="a"))
    for name, stage in stages.items():
        setattr(tokenizer, name, stage)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_info(prefix, CorpusInfo(folder.name, len(vocab)))


@pytest.fixture
def corpora(write_corpus: WriteCorpus) -> dict[str, str]:
    """Prefixes of corpora: of two vocabularies, of the first one again, of bytes, and without a
    record.
    """
    names = ("ab", "ba", "same_ids", "bytes", "unknown")
    prefixes = {name: write_corpus([np.full(161, 1)], name=name) for name in names}
    write_tokenizer(prefixes["ab"], vocab={"a": 0, "b": 1})
    write_tokenizer(prefixes["ba"], vocab={"a": 1, "b": 0})
    write_tokenizer(
        prefixes["same_ids"], vocab={"b": 1, "a": 0}, decoder=tokenizers.decoders.ByteLevel()
    )
    write_info(prefixes["bytes"], CorpusInfo("bytes", 257, 256))
    return {name: str(prefix) for name, prefix in prefixes.items()}


def build(**paths: list[str]) -> None:
    build_data(
        DataConfig(seq_length=16, split="1", **paths), vocab_size=10, seed=1, required=["train"]
    )


def test_different_tokenizers_are_an_error(corpora: dict[str, str]) -> None:
    ab, ba, letters = corpora["ab"], corpora["ba"], corpora["bytes"]
    with pytest.raises(
        ConfigError,
        match=f"{ab} and {ba} were prepared with different tokenizers: .*; .* {ba} with",
    ):
        build(data_path=["0.5", ab, "0.5", ba])
    with pytest.raises(
        ConfigError, match=f"stands for different texts in {ab}.tokenizer and bytes"
    ):
        build(data_path=[ab, letters])
    with pytest.raises(ConfigError, match=f"{ab} and {ba} were"):
        build(train_data_path=[ab], valid_data_path=[ba])
    with pytest.raises(ConfigError, match=f"{letters} and {ba} were"):
        build(stages=[f"first@0: {letters}", f"second@9: {ba}"])


def test_what_is_the_same_or_not_known_is_read_together(corpora: dict[str, str]) -> None:
    build(data_path=[corpora["ab"], corpora["unknown"], corpora["same_ids"], corpora["ab"]])
    build(data_path=[corpora["unknown"], corpora["bytes"]])
    # as vocab.json with merges.txt
    (tokenizer_path(Path(corpora["ba"])) / "tokenizer.json").unlink()
    build(data_path=[corpora["ab"], corpora["ba"]])


def test_merges_in_the_form_of_older_libraries_are_the_same(write_corpus: WriteCorpus) -> None:
    prefixes = [write_corpus([np.full(161, 1)], name=name) for name in ("old", "new")]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    for prefix in prefixes:
        write_tokenizer(prefix, vocab={"a": 0, "b": 1, "ab": 2})
    content = json.loads(tokenizer.to_str())
    (tokenizer_path(prefixes[1]) / "tokenizer.json").write_text(json.dumps(content))
    content["model"]["merges"] = ["a b"]
    del content["model"]["ignore_merges"]
    (tokenizer_path(prefixes[0]) / "tokenizer.json").write_text(json.dumps(content))
    build(data_path=[str(prefix) for prefix in prefixes])


def test_a_model_is_evaluated_on_token_files_of_its_tokenizer(corpora: dict[str, str]) -> None:
    model = str(tokenizer_path(Path(corpora["ab"])))
    for name in ("ab", "same_ids", "unknown"):
        require_tokenizer_of(model, corpora[name])
    require_tokenizer_of(None, corpora["ba"])
    for name in ("ba", "bytes"):
        with pytest.raises(
            ConfigError, match=f"another tokenizer than the model's.*--tokenizer {model}"
        ):
            require_tokenizer_of(model, corpora[name] + ".bin")


def test_what_auto_tokenizer_reads_beside_the_vocabulary_counts(tmp_path: Path) -> None:
    """A copy that says everything in tokenizer.json is the folder whose class builds the same."""
    published = Path(write_kind("llama2", tmp_path / "published"))
    load_tokenizer(str(published)).save(tmp_path / "copy")
    assert is_same_tokenizer(str(published), str(tmp_path / "copy")) is True
    other = tmp_path / "other"
    shutil.copytree(published, other)
    (other / "added_tokens.json").write_text('{"<new>": 500}')
    assert is_same_tokenizer(str(published), str(other)) is False
