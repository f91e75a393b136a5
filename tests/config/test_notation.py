"""Patterns of layers, pipeline layouts, and entries of --data-stages: form, order and unit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.config.load import load_config
from nanotrain.config.notation import (
    moves_mtp_layers,
    read_layer_pattern,
    read_pipeline_layout,
    read_stages,
    stage_bounds,
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


def test_starts_are_steps_or_samples_and_are_converted_by_the_schedule_of_batches():
    stages = read_stages(
        ["warm@0: web", "main@10: 0.7 web 0.3 code", "end@1.5K: a path with blanks"]
    )
    assert [stage.blend for stage in stages] == ["web", "0.7 web 0.3 code", "a path with blanks"]
    assert stage_bounds(stages, lambda steps: 8 * steps) == ((0, None), (80, None), (12_000, None))
    assert stage_bounds(read_stages(["a@0: x", "b@100samples: y"]), lambda n: 8 * n) == (
        (0, None),
        (100, None),
    )
    changing = read_stages(["a@0: x", "b@1K..1.5K: y"])
    assert stage_bounds(changing, lambda steps: 8 * steps) == ((0, None), (8000, 12_000))
    assert stage_bounds(read_stages(["a@0: x", "b@5..9samples: y"]), lambda n: 8 * n) == (
        (0, None),
        (5, 9),
    )


def test_all_mistakes_of_the_stages_are_one_error():
    texts = ["a@5: web", "a@5: web", "b@4: web", "c@900: web"]
    with pytest.raises(ConfigError) as caught:
        read_stages(texts, 100)
    for fact in (
        "a is the name of 2 stages",
        "the first stage, a, starts at 5",
        "a starts at 5, not after a at 5",
        "b starts at 4, not after a at 5",
        "c starts at step 900 of a run of 100 steps",
    ):
        assert fact in str(caught.value)
    with pytest.raises(ConfigError, match=r"'web' is not NAME@START: BLEND; 'a@x: web' is not"):
        read_stages(["web", "a@x: web"])
    for texts, fact in (
        (["a@0..5: web"], "the first stage, a, has none before it to change from"),
        (["a@0: web", "b@9..9: web"], "b changes from 9 to 9, which is not later"),
        (["a@0: web", "b@9..20: web", "c@15: web"], "b changes until 20, after c starts at 15"),
        (["a@0: web", "b@9..x: web"], "is not NAME@START: BLEND"),
    ):
        with pytest.raises(ConfigError, match=fact):
            read_stages(texts)
    with pytest.raises(ConfigError, match="some stages start at steps and some at samples"):
        read_stages(["a@0: web", "b@10: web", "c@20samples: web"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--data-path", "web"], "data_stages and data_path are both set"),
        (["--train-data-path", "web"], "data_stages and train_data_path are both set"),
        (["--mock-data"], "data.stages = .* has no effect"),
        (["--train-iters", "5"], "late starts at step 7 of a run of 5 steps"),
    ],
)
def test_a_command_line_refuses_what_contradicts_the_stages(more, message):
    with pytest.raises(ConfigError, match=message):
        load_config(["--vocab-size", "9", "--data-stages", "early@0: web", "late@7: code", *more])
