"""Every kind of tokenizer has AutoTokenizer's ids, from its folder and from the copy of a run."""

from pathlib import Path

import pytest

from nanotrain.data.tokenizer import load_tokenizer
from tests.data.compare_tokenizers import compare
from tests.data.tokenizer_kinds import KINDS, texts_for, write_kind


@pytest.mark.parametrize("name", KINDS)
def test_ids_are_those_of_auto_tokenizer(name: str, tmp_path: Path) -> None:
    found = compare(write_kind(name, tmp_path / "folder"), tmp_path / "copy")
    assert (found.texts, found.total) == (300, 0), found


def test_no_kind_is_like_another_one() -> None:
    assert len(KINDS) >= 40 and len(set(texts_for(["<s>"]))) > 290


def test_what_differs_from_auto_tokenizer_is_said(tmp_path: Path) -> None:
    dropout = load_tokenizer(str(write_kind("gpt2 dropout", tmp_path / "dropout")))
    assert dropout.notes == (
        "BPE dropout 0.4 of tokenizer.json is off: the same text always has the same tokens",
    )
    words = load_tokenizer(str(write_kind("bert uncased", tmp_path / "words")))
    assert words.notes == (
        "no eos_token is named: [SEP], a usual name, ends documents",
        "AutoTokenizer adds [CLS] [SEP] to a text; documents are encoded without, and end with "
        "the end-of-document token",
    )
    words.save(tmp_path / "copy")
    assert load_tokenizer(str(tmp_path / "copy")).notes == words.notes[1:]  # the copy names it
