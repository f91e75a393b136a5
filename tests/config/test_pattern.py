"""Patterns of layers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.config.pattern import read_pattern, write_pattern
from nanotrain.errors import ConfigError


@given(st.lists(st.booleans(), min_size=1, max_size=80))
def test_what_is_written_reads_back(layers):
    written = read_pattern(write_pattern(tuple(layers)))
    assert written == (1 if all(layers) else [int(layer) for layer in layers])


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("[0]*3+[1]*2", [0, 0, 0, 1, 1]),
        ("3*[0, 1]", [0, 1] * 3),
        ("([0]+[1]*2)*2", [0, 1, 1] * 2),
        (" 2 ", 2),
        ("[1]*(2+1)", [1, 1, 1]),
        ("[0]*(4-3)+[1]*(2*1)", [0, 1, 1]),
    ],
)
def test_a_pattern_is_lists_joined_and_repeated(text, layers):
    assert read_pattern(text) == layers


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-1",
        "1.5",
        "[]",
        "[2]",
        "[1]*0",
        "[[1]]",
        "[1]*[1]",
        "[1]*10**9",
        "[1]*(9999+9999)",
        "[1]*(1-1)",
        "1-2",
        "print(1)",
        "[1",
        "x",
    ],
)
def test_anything_else_is_an_error_and_never_run(text):
    with pytest.raises(ConfigError, match="moe_layer_freq is"):
        read_pattern(text)
