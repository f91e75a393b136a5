"""Tests in shell scripts decide which branch is followed."""

import pytest

from nanotrain.audit.shell_script import read_script
from nanotrain.audit.shell_values import without_marks


def arguments(text: str) -> list[str]:
    (launch,) = read_script(text, variables={}).launches
    return [without_marks(word) for word in launch[2:]]


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ('[ "$B" == 2 ]', True),
        ("[[ $B == 2 && -z $A ]]", True),
        ("[ $B -gt 2 ]", False),
        ('[ -n "$A" ]', False),
        ("[[ $B != 2 ]] || [ 1 -eq 1 ]", True),
        ("! [ $B = 3 ]", True),
        ("[[ $NAME == *-8b ]]", True),
        ("[ -f file ]", False),
        ("grep x y", False),
        ("[ -f file ] || [ $B -le 2 ]", True),
        ("[[ " + "a && " * 5_000 + "a ]]", False),
        ("[[ " + "! " * 5_000 + "a ]]", False),
        ("[[ a == " + "*a" * 5_000 + " ]]", False),
    ],
)
def test_a_branch_is_followed_if_its_condition_holds(condition, holds):
    text = f"B=2; NAME=llama-8b\nif {condition}; then C=yes; else C=no; fi\npython p.py $C"
    assert arguments(text) == ["yes" if holds else "no"]
