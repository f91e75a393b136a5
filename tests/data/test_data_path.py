"""Data paths: prefixes and weights."""

from fractions import Fraction
from pathlib import Path

import pytest

from nanotrain.data.data_path import WeightedPrefix, parse_data_path
from nanotrain.errors import ConfigError


def test_prefixes_alone_are_blended_by_size() -> None:
    assert parse_data_path(["a", "b.bin"]) == (WeightedPrefix(Path("a")), WeightedPrefix(Path("b")))


@pytest.mark.parametrize("entries", [["0.7", "a", "0.3", "b"], ["0.7 a 0.3 b"]])
def test_weights_are_exact_fractions(entries: list[str]) -> None:
    assert parse_data_path(entries) == (
        WeightedPrefix(Path("a"), Fraction(7, 10)),
        WeightedPrefix(Path("b"), Fraction(3, 10)),
    )


def test_a_prefix_that_looks_like_a_number_is_a_prefix_where_its_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("2024.idx").touch()
    assert parse_data_path(["1", "2024"]) == (WeightedPrefix(Path("2024"), Fraction(1)),)


@pytest.mark.parametrize("entries", [["0.7", "a", "b"], ["a", "0.3", "b"], ["0.5"], ["0", "a"], ["-1", "a"]])
def test_weights_without_sense_are_refused(entries: list[str]) -> None:
    with pytest.raises(ConfigError, match="--data-path"):
        parse_data_path(entries)


def test_a_folder_without_a_name_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_data_path(["."]) == (WeightedPrefix(tmp_path.resolve()),)
