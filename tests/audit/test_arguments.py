"""Flags with their values, and conditions over them."""

import pytest

from nanotrain.audit.arguments import Argument, Condition, FlagValues, is_same, read_arguments


def values(text: str) -> FlagValues:
    return FlagValues.of(read_arguments(text.split())[0])


def test_words_become_arguments():
    arguments, before = read_arguments(["run", "x", "--lr=1e-4", "--bf16", "--betas", "0.9", "-1"])
    assert before == ["run", "x"]
    assert arguments == [
        Argument("--lr", ("1e-4",)),
        Argument("--bf16"),
        Argument("--betas", ("0.9", "-1")),
    ]


def test_the_last_occurrence_counts():
    assert values("--lr 1 --lr 2").text("--lr") == "2"


def test_sizes_are_positive_whatever_is_written():
    assert [values(f"--a {text}").size("--a") for text in ("8", "0", "-3", "x", "")] == [
        8,
        1,
        1,
        1,
        1,
    ]
    assert values("").size("--a") == 1


@pytest.mark.parametrize(
    ("row", "line", "holds"),
    [
        ("--a", "--a", True),
        ("--a", "--b", False),
        ({"flag": "--a", "above": 1}, "--a 2", True),
        ({"flag": "--a", "above": 1}, "--a 1", False),
        ({"flag": "--a", "above": 1}, "--a x", False),
        ({"flag": "--a", "one_of": ["x", "1"]}, "--a 1.0", True),
        ({"flag": "--a", "one_of": ["x"]}, "--a y", False),
        ({"flag": "--a", "contains": "G"}, "--a MG*", True),
        ({"flag": "--a", "above": 0, "default": "0.1"}, "", True),
        ({"flag": "--a", "above": 0, "default": "0.1"}, "--a 0.0", False),
        ({"flag": "--a", "differs_from": "--b"}, "--a 2 --b 4", True),
        ({"flag": "--a", "differs_from": "--b"}, "--a 1", False),
        ({"flag": "--a", "not_divisible_by": "--b"}, "--a 12 --b 8", True),
        ({"flag": "--a", "not_divisible_by": "--b"}, "--a 16 --b 8", False),
        ({"flag": "--a", "below": "--b"}, "--a 8 --b 16", True),
        ({"flag": "--a", "below": "--b"}, "--a 8", False),
        ({"any": ["--a", "--b"]}, "--b", True),
        ({"any": ["--a", "--b"]}, "--c", False),
    ],
)
def test_a_condition_holds_for_its_values_alone(row, line, holds):
    condition = Condition.of(row)
    assert bool(condition.evidence(values(line))) == holds
    assert "--a" in str(condition)


def test_the_evidence_is_what_is_written():
    row = {"flag": "--a", "not_divisible_by": "--b"}
    assert Condition.of(row).evidence(values("--a 12 --b 8")) == "--a 12 with --b 8"
    assert is_same("1e1", "10") and not is_same("a", "1")
