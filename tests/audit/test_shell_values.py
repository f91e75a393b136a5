"""Values in the words of shell scripts: variables, defaults, arrays and sums."""

import pytest

from nanotrain.audit.shell_script import read_script
from nanotrain.audit.shell_values import whole_result, without_marks


def arguments(text: str) -> list[str]:
    (launch,) = read_script(text, variables={}).launches
    return [without_marks(word) for word in launch[2:]]


def test_arrays_and_strings_are_expanded_as_a_shell_does():
    text = """
        SIZE=8
        MODEL=(--num-layers $SIZE "--name" "a b")
        MODEL+=(--bf16)
        OTHER="--lr 1e-4 \\
            --swiglu"
        torchrun p.py "${MODEL[@]}" $OTHER ${NONE[@]} "${SIZE}0"
    """
    expected = ["--num-layers", "8", "--name", "a b", "--bf16", "--lr", "1e-4", "--swiglu", "80"]
    assert arguments(text) == expected


def test_unquoted_values_are_divided_and_quoted_ones_are_not():
    assert arguments('A="x y"; python p.py $A "$A" -$A-') == ["x", "y", "x y", "-x", "y-"]


@pytest.mark.parametrize(
    ("expansion", "value"),
    [
        ("${A:-1}", "1"),
        ("${A-1}", "1"),
        ("${A:=1}", "1"),
        ("${A:+1}", ""),
        ("${B:-1}", "2"),
        ("${B:+3}", "3"),
        ("${E:-1}", "1"),
        ("${E-1}", ""),
        ("$((4 * (B + 1)))", "12"),
        ("$((B / 0))", "$(...)"),
        ("$(($1 * 2))", "$(...)"),
        ("$(hostname)", "$(...)"),
        ("$A", "$A"),
    ],
)
def test_an_expansion_has_a_value(expansion, value):
    assert arguments(f'B=2; E=""; python p.py "x{expansion}"') == [f"x{value}"]


def test_sums_have_whole_numbers_alone():
    assert whole_result("7 % 4 - -2") == 5
    assert whole_result("'a' * 9") is None
    assert whole_result("(" * 5_000) is None
