"""Splits divide the documents as Megatron-LM does, without gaps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanotrain.data.split import parse_split, split_documents
from nanotrain.errors import ConfigError


@settings(deadline=None)
@given(count=st.integers(0, 10**9), parts=st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any))
def test_splits_tile_the_documents(count: int, parts: list[int]) -> None:
    ranges = split_documents(count, ",".join(map(str, parts)))
    assert ranges[0].start == 0
    assert ranges[-1].stop == count
    assert all(one.stop == other.start for one, other in zip(ranges, ranges[1:], strict=False))
    assert all(one.start <= one.stop for one in ranges)


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
