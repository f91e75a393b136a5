"""Patterns of layers and pipeline layouts: what is written reads back, the rest is an error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.config.notation import (
    moves_mtp_layers,
    read_layer_pattern,
    read_pipeline_layout,
    write_pattern,
    write_pipeline_layout,
)
from nanotrain.errors import ConfigError


@given(st.lists(st.booleans(), min_size=1, max_size=80))
def test_what_is_written_reads_back(layers):
    assert read_layer_pattern(
        "moe_layer_freq", write_pattern(tuple(layers)), num_layers=len(layers)
    ) == tuple(layers)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("[0]*3+[1]*2", [0, 0, 0, 1, 1]),
        ("3*[0, 1]", [0, 1] * 3),
        ("([0]+[1]*2)*2", [0, 1, 1] * 2),
        (" 2 ", [1, 0, 1]),
        ("[1]*(2+1)", [1, 1, 1]),
        ("[0]*(4-3)+[1]*(2*1)", [0, 1, 1]),
    ],
)
def test_a_pattern_is_lists_joined_and_repeated(text, layers):
    assert read_layer_pattern("moe_layer_freq", text, num_layers=len(layers)) == tuple(
        map(bool, layers)
    )


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
        read_layer_pattern("moe_layer_freq", text, num_layers=1)


@given(st.integers(0, 4), st.lists(st.integers(1, 5), max_size=6), st.integers(0, 4))
def test_a_layout_that_is_written_reads_back(first: int, between: list[int], last: int) -> None:
    lengths = (first + (not between and not last), *between, last)
    assert read_pipeline_layout(write_pipeline_layout(lengths)) == lengths


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("EttL", (2,)),
        ("Et|t,m*2 L", (1, 1)),
        ("E|t|tL", (0, 1, 1)),
        ("Et*3|(tt|)*29,t|L", (3, *[2] * 29, 1, 0)),
        # the layout of Megatron-LM's example for DeepSeek-V3
        ("Et*3|(tt|)*29,m|L", (3, *[2] * 29, 0, 0)),
        ("Et|tm|L", (1, 1, 0)),
        ("E t | ((t|)*2 tt|)*2 t L", (1, 1, 1, 2, 1, 1, 2, 1)),
    ],
)
def test_the_syntax_of_megatron_is_read(text: str, lengths: tuple[int, ...]) -> None:
    assert read_pipeline_layout(text) == lengths


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "the embedding E is first"),
        ("tt|tt", "the embedding E is first"),
        ("Ett|ttLt", "the loss L is last"),
        ("EL", "between the first and the last has layers"),
        ("Et||tL", "between the first and the last has layers"),
        ("Et|tm|mL", "multi-token prediction, m, are on one stage"),
        ("Et|t|m||L", "between the first and the last has layers"),
        ("Et|mtL", "the loss L is last"),
        ("Et|x|L", "'x' is not one of"),
        ("E(t|tL", r"'\(' is not one of"),
        ("Et*999999999L", "more than 100000 letters"),
        ("E(((t*99999)*9)*9)L", "more than 100000 letters"),
    ],
)
def test_another_text_is_an_error(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_pipeline_layout(text)


def test_layers_of_multi_token_prediction_before_the_last_stage_are_noted() -> None:
    """They run on the stage of the head; the header of a run says so (docs/from_megatron.md)."""
    moved = {
        layout: moves_mtp_layers(layout)
        for layout in ("Et|tt|m|L", "Et|t|tmL", "Et|tm*2|L", "Ett|t|tL")
    }
    assert moved == {"Et|tt|m|L": True, "Et|t|tmL": False, "Et|tm*2|L": True, "Ett|t|tL": False}
    assert read_pipeline_layout("Et|tt|m|L") == (1, 2, 0, 0)


@pytest.mark.parametrize("field", ["moe_layer_freq", "window_attn_skip_freq", "no_rope_freq"])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8])
def test_a_pattern_has_one_value_per_layer(field: str, count: int) -> None:
    text = "[1]*2+[0]*2" if count == 4 else f"[1]*{count}"
    if count == 4:
        assert read_layer_pattern(field, text, num_layers=4) == (True, True, False, False)
        return
    with pytest.raises(ConfigError, match="4 layers"):
        read_layer_pattern(field, text, num_layers=4)
