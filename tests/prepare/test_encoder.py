"""What the tokens of a document do not say is counted, whatever the tokenizer."""

from dataclasses import replace
from pathlib import Path

import pytest

from nanotrain.data.tokenizer import ByteTokenizer, load_tokenizer
from nanotrain.prepare.bpe import train_bpe
from nanotrain.prepare.encoder import DocumentEncoder, can_lose_characters
from nanotrain.prepare.text_counts import TextCounts, lines_of
from tests.data.tokenizer_kinds import END, write_kind


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kinds")


def encoder(kinds: Path, name: str, *, parse_special: bool = False) -> DocumentEncoder:
    folder = kinds / name
    if not folder.exists():
        write_kind(name, folder)
    return DocumentEncoder(load_tokenizer(str(folder)), parse_special=parse_special)


def test_special_tokens_in_a_document_stay_text_in_every_kind(kinds: Path) -> None:
    trained = DocumentEncoder(train_bpe(["a b c"] * 9, 300))
    for own in (trained, DocumentEncoder(ByteTokenizer()), encoder(kinds, "gpt2")):
        ids = own.encode(f"a{END}b")
        assert own.tokenizer.eod not in ids and own.tokenizer.decode(ids) == f"a{END}b"
    assert trained.counts == TextCounts(special=1)
    # and a prompt still has them
    assert own.tokenizer.encode(END) == [own.tokenizer.eod]


def test_parse_special_gives_the_ids_of_auto_tokenizer(kinds: Path) -> None:
    own = encoder(kinds, "gpt2", parse_special=True)
    assert own.encode(f"a{END}b")[1] == own.tokenizer.eod
    assert own.counts == TextCounts(special=1, uneven=1)
    line = lines_of(own.counts, tokenizer=own.tokenizer, num_tokens=3, parse_special=True)
    assert line[0] == (
        "1 document with the text of a special token (<|endoftext|>), "
        "which became the token (--parse-special)"
    )


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt2", "日本 \x00", TextCounts()),
        ("llama", "日本 \x00", TextCounts()),
        ("nothing for unknown", "low § lower", TextCounts(lost=1)),
        ("bert cased", "low § \x00lower", TextCounts(unknown=1, lost=1)),
        ("words lower", "e\u0301 low §", TextCounts(unknown=2, lost=1)),
        ("t5", "low § lower", TextCounts(unknown=1)),
    ],
)
def test_unknown_and_lost_characters_are_counted(
    kinds: Path, name: str, text: str, expected: TextCounts
) -> None:
    own = encoder(kinds, name)
    own.encode(text)
    assert replace(own.counts, uneven=0) == expected
    # their bytes are not in the tokens
    assert own.counts.uneven or not (expected.lost or expected.unknown)
    assert not expected.lost or can_lose_characters(own.tokenizer)


@pytest.mark.parametrize("name", ["bert cased", "words lower", "gpt2"])
def test_what_is_counted_adds_up_over_documents(kinds: Path, name: str) -> None:
    texts = ["low § \x00lower", "low", f"a{END}b", "", "low § e\u0301"]
    by_document = []
    for text in texts:
        own = encoder(kinds, name)
        own.encode(text)
        by_document.append(own.counts)
    together = encoder(kinds, name)
    for text in texts:
        together.encode(text)
    for field in ("special", "unknown", "lost", "uneven"):
        assert getattr(together.counts, field) == sum(
            getattr(count, field) for count in by_document
        )
    assert together.counts != by_document[-1]
