"""Counts of documents add up, come back from their file, and are said."""

import pytest

from nanotrain.data.tokenizer import ByteTokenizer
from nanotrain.prepare.text_counts import TextCounts, lines_of


def test_counts_add_up_and_come_back() -> None:
    counts = TextCounts.total([TextCounts(special=1, lost=2), TextCounts(lost=3, empty=1)])
    assert counts == TextCounts(special=1, lost=5, empty=1)
    assert TextCounts.parse(counts.to_json()) == counts
    with pytest.raises(ValueError, match="unknown is -1"):
        TextCounts.parse(TextCounts(unknown=-1).to_json())
    lines = lines_of(
        TextCounts(empty=1, surrogates=2, unknown=5, lost=1),
        tokenizer=ByteTokenizer(),
        num_tokens=100,
        parse_special=False,
    )
    assert lines == [
        "left out: 1 empty document",
        "2 documents with lone surrogates, which no UTF-8 has: they became question marks",
        "5 tokens (5.00%) unknown: the vocabulary lacks their characters",
        "1 character lost: the tokenizer removes them or has no token for them",
    ]
