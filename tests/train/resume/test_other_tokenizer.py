"""Weights of one tokenizer and a corpus of another are named; what may be the same is not."""

from dataclasses import replace
from pathlib import Path

import pytest

from nanotrain.config.config import Config, DataConfig
from nanotrain.config.schema import to_dict
from nanotrain.data.corpus_info import CorpusInfo, write_info
from nanotrain.prepare.bpe import train_bpe
from nanotrain.train.resume import other_tokenizer
from nanotrain.train.resume.other_tokenizer import warn_after_import, warn_after_restore


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged, whatever an entry point of another test did to the loggers."""
    lines: list[str] = []
    monkeypatch.setattr(other_tokenizer.log, "info", lambda text, *args: lines.append(text % args))
    return lines


@pytest.fixture
def corpora(tmp_path: Path) -> Path:
    """Infos of four corpora: two of one BPE, one of another with as many tokens, one of an unknown tokenizer."""
    first, other = (train_bpe([text] * 9, 262) for text in ("low lower lowest", "new newer newest"))
    for name, tokenizer in (("a", first), ("b", first), ("c", other)):
        tokenizer.save(tmp_path / f"{name}.tokenizer")
        write_info(tmp_path / name, CorpusInfo(f"{name}.tokenizer", 262))
    write_info(tmp_path / "unknown", CorpusInfo())
    return tmp_path


def _data(corpora: Path, name: str) -> DataConfig:
    return DataConfig(data_path=[str(corpora / name)])


@pytest.mark.parametrize(
    ("weights", "corpus", "warns"),
    [("a", "b", False), ("a", "c", True), ("a", "unknown", False), ("unknown", "a", False), ("gone", "a", False)],
)
def test_a_checkpoint_of_another_tokenizer_is_named(corpora, weights, corpus, warns, logged):
    class Saved:
        config = to_dict(replace(Config(), data=_data(corpora, weights)))

    warn_after_restore(Saved(), _data(corpora, corpus), path=corpora / "step-00000001")
    assert ("in which the same id is" in "".join(logged)) == warns
    assert (f"--tokenizer {corpora / 'a.tokenizer'}" in "".join(logged)) == warns


def test_a_hugging_face_folder_of_another_tokenizer_is_named(corpora, logged):
    for folder, corpus, warns in (("a.tokenizer", "b", 0), ("c.tokenizer", "b", 1), (".", "b", 1)):
        warn_after_import(corpora / folder, _data(corpora, corpus))
        assert "".join(logged).count("in which the same id") == warns
