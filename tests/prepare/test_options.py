"""The options of prepare: parsed, complete and checked."""

import argparse
from pathlib import Path

import pytest

from nanotrain.errors import DataError
from nanotrain.prepare.options import PrepareOptions, add_arguments


def _parse(*argv: str) -> PrepareOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return PrepareOptions.from_args(parser.parse_args(argv))


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
    assert _parse("--input", "a", "--output", "corpus.bin", "--tokenizer", "gpt2").output == Path("corpus")


def test_a_tokenizer_with_a_name_is_not_trained() -> None:
    assert _parse("--input", "a", "--output", "b", "--tokenizer", "gpt2").bpe_vocab_size is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": "bpe:many"}, "bpe:many has no size"),
        ({"tokenizer": ""}, "--tokenizer is empty"),
        ({"workers": 0}, "--workers 0 is not positive"),
        ({"max_documents": 5}, "--max-documents has no effect without --streaming"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, object], message: str) -> None:
    values: dict[str, object] = {"input": ("a",), "output": Path("b"), "tokenizer": "bytes"}
    with pytest.raises(DataError, match=message):
        PrepareOptions(**values | options)  # type: ignore[arg-type]
