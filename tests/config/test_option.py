"""Fields are declared with a meaning and a bound."""

from dataclasses import dataclass, fields

import pytest

from nanotrain.config.option import above, at_least, between, option


@dataclass(frozen=True)
class Sample:
    words: list[str] = option(["a"], "some words")
    count: int = option(3, "how many", check=at_least(1))


def test_a_list_default_is_not_shared():
    assert Sample().words == Sample().words == ["a"]
    assert Sample().words is not Sample().words


def test_options_keep_their_order_and_meaning():
    assert [(field.name, field.metadata["meaning"]) for field in fields(Sample)] == [
        ("words", "some words"),
        ("count", "how many"),
    ]


@pytest.mark.parametrize(
    ("check", "passing", "failing"),
    [
        (at_least(1), [None, 1, 2], [0, 0.9]),
        (above(0), [None, 1e-9], [0, -1]),
        (between(0, 1), [None, 0, 0.99], [1, -0.1]),
    ],
)
def test_a_bound_passes_what_is_unset_and_says_what_it_wants(check, passing, failing):
    assert all(check(value) for value in passing) and not any(check(value) for value in failing)
    assert check.__doc__.startswith("must be")
