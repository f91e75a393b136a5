"""The options of prepare: parsed, complete and checked."""

from pathlib import Path

import pytest

from nanotrain.cli.prepare import prepare_parser
from nanotrain.errors import ConfigError, DataError
from nanotrain.prepare.options import PrepareOptions


def _parse(*argv: str) -> PrepareOptions:
    return PrepareOptions.from_args(prepare_parser().parse_args(argv))


def test_every_argument_reaches_its_field() -> None:
    options = _parse(
        *("--input", "a", "b", "--output", "~/out", "--tokenizer", "bpe:300", "--workers", "3"),
        *("--text-column", "body", "--subset", "en", "--split-name", "valid", "--streaming"),
        *("--max-documents", "9", "--no-append-eod", "--dtype", "int32", "--overwrite"),
    )  # fmt: skip
    assert options == PrepareOptions(
        input=("a", "b"), output=Path("~/out").expanduser(), tokenizer="bpe:300", workers=3, text_column="body",
        subset="en", split_name="valid", streaming=True, max_documents=9, append_eod=False, dtype="int32",
        overwrite=True,
    )  # fmt: skip
    assert options.bpe_vocab_size == 300
    assert options.parts == options.output.with_name("out.parts")


def test_a_file_of_the_pair_names_its_prefix() -> None:
    assert _parse("--input", "a", "--output", "corpus.bin", "--tokenizer", "gpt2").output == Path(
        "corpus"
    )


def test_a_tokenizer_with_a_name_is_not_trained() -> None:
    assert _parse("--input", "a", "--output", "b", "--tokenizer", "gpt2").bpe_vocab_size is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": "bpe:many"}, "bpe:many has no size"),
        ({"tokenizer": ""}, "--tokenizer is empty"),
        ({"max_documents": 5}, "--max-documents has no effect without --streaming"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, object], message: str) -> None:
    values: dict[str, object] = {"input": ("a",), "output": Path("b"), "tokenizer": "bytes"}
    with pytest.raises(DataError, match=message):
        PrepareOptions(**values | options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "flag", ["--workers", "--max-documents", "--max-document-bytes", "--max-inflation"]
)
def test_numbers_are_at_least_1(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag}: '0' is no whole number of at least 1"):
        _parse("--input", "a", "--output", "b", "--tokenizer", "bytes", flag, "0")
