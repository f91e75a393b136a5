"""Data paths: prefixes and weights."""

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanotrain.data.data_path import WeightedPrefix, parse_data_path, parse_split, split_documents
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


@pytest.mark.parametrize(
    "entries", [["0.7", "a", "b"], ["a", "0.3", "b"], ["0.5"], ["0", "a"], ["-1", "a"]]
)
def test_weights_without_sense_are_refused(entries: list[str]) -> None:
    with pytest.raises(ConfigError, match="--data-path"):
        parse_data_path(entries)


def test_a_folder_without_a_name_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_data_path(["."]) == (WeightedPrefix(tmp_path.resolve()),)


@settings(deadline=None)
@given(
    count=st.integers(0, 10**9),
    parts=st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any),
)
def test_splits_tile_the_documents(count: int, parts: list[int]) -> None:
    ranges = split_documents(count, ",".join(map(str, parts)))
    assert ranges[0].start == 0
    assert ranges[-1].stop == count
    assert all(left.stop == right.start for left, right in zip(ranges, ranges[1:], strict=False))
    assert all(each.start <= each.stop for each in ranges)


def test_the_default_split_of_a_thousand_documents() -> None:
    assert split_documents(1000, "969,30,1") == (
        range(969),
        range(969, 999),
        range(999, 1000),
    )


def test_one_number_gives_everything_to_training() -> None:
    assert parse_split("1,0,0") == parse_split("100") == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "-1,1", "0,0,0", "nan,1", "inf,1"])
def test_a_split_without_sense_is_refused(split: str) -> None:
    with pytest.raises(ConfigError, match="cannot be parsed"):
        parse_split(split)
