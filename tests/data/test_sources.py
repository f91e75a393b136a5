"""Data paths: prefixes, weights, and the tokenizer beside them."""

from fractions import Fraction
from pathlib import Path

import pytest

from nanotrain.data.sources import Record, Source, parse_data_path, tokenizer_beside, write_record
from nanotrain.errors import ConfigError, DataError


def test_prefixes_alone_are_blended_by_size() -> None:
    assert parse_data_path(["a", "b.bin"]) == (Source(Path("a")), Source(Path("b")))


@pytest.mark.parametrize("entries", [["0.7", "a", "0.3", "b"], ["0.7 a 0.3 b"]])
def test_weights_are_exact_fractions(entries: list[str]) -> None:
    assert parse_data_path(entries) == (Source(Path("a"), Fraction(7, 10)), Source(Path("b"), Fraction(3, 10)))


def test_a_prefix_that_looks_like_a_number_is_a_prefix_where_its_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("2024.idx").touch()
    assert parse_data_path(["1", "2024"]) == (Source(Path("2024"), Fraction(1)),)


@pytest.mark.parametrize("entries", [["0.7", "a", "b"], ["a", "0.3", "b"], ["0.5"], ["0", "a"], ["-1", "a"]])
def test_weights_without_sense_are_refused(entries: list[str]) -> None:
    with pytest.raises(ConfigError, match="--data-path"):
        parse_data_path(entries)


def test_the_tokenizer_is_found_beside_the_pair_wherever_the_folder_moves(tmp_path: Path) -> None:
    write_record(tmp_path / "web", Record("web.tokenizer", 300, 0))
    write_record(tmp_path / "raw", Record("bytes", 257, 256))
    assert tokenizer_beside(tmp_path / "web") == str(tmp_path / "web.tokenizer")
    assert tokenizer_beside(tmp_path / "raw") == "bytes"
    assert tokenizer_beside(tmp_path / "megatron") is None


def test_a_record_that_cannot_be_read_is_an_error_with_a_cure(tmp_path: Path) -> None:
    (tmp_path / "web.nanotrain.json").write_text("{")
    with pytest.raises(DataError, match=r"web\.nanotrain\.json cannot be read.*--tokenizer-model"):
        tokenizer_beside(tmp_path / "web")
