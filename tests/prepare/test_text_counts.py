"""Counts of documents add up, come back from their file, and are said."""

from dataclasses import asdict, fields

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


@pytest.mark.parametrize("name", [field.name for field in fields(TextCounts)])
def test_every_count_adds_up_comes_back_and_has_a_line_of_its_own(name: str) -> None:
    parts = [TextCounts(**{name: number}) for number in (3, 0, 4)]
    total = TextCounts.total(parts)
    assert asdict(total) == dict.fromkeys(asdict(total), 0) | {name: 7}
    assert TextCounts.parse(total.to_json()) == total
    (line,) = lines_of(total, tokenizer=ByteTokenizer(), num_tokens=100, parse_special=False)
    assert "7 " in line
    assert TextCounts.total([]) == TextCounts() == TextCounts.parse("{}")
