"""Training of a byte-level BPE tokenizer."""

import pytest

from nanotrain.errors import DataError
from nanotrain.prepare.bpe import split_runs, train_bpe


def test_an_unbroken_run_of_characters_is_trained_on_in_parts():
    """The trainer compares all pairs within a word: 80,000 letters in one took 1.2 s, four times
    those of 40,000.
    """
    text = "def f():\n" + "ab" * 50_000 + " \n" + " " * 3_000 + "end"
    parts = split_runs(text)
    assert "".join(parts) == text and max(map(len, parts)) <= 1000 + len("def f():\n")
    assert split_runs("words of a usual length\n" * 100) == ["words of a usual length\n" * 100]
    tokenizer = train_bpe([text], 260)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("abab")) < 4, "merges are learned from the parts"


def test_a_vocabulary_without_room_for_the_bytes_is_an_error():
    with pytest.raises(DataError, match="256 bytes"):
        train_bpe(["text"], 256)
    with pytest.raises(DataError, match="999,999,999 is too large: .*at most 4,194,304"):
        train_bpe(["text"], 999_999_999)
