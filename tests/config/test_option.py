"""Fields are declared with a bound, and a docstring below them."""

from dataclasses import dataclass, fields

import pytest

from nanotrain.config import option as option_module
from nanotrain.config.option import Entry, above, at_least, between, field_help, option


@dataclass(frozen=True)
class Sample:
    words: list[str] = option(["a"])
    """some words"""

    count: int = option(3, check=at_least(1))
    """how many, in a text that
    has two lines
    """

    name: str = option("")


@dataclass(frozen=True)
class Extended(Sample):
    size: int = option(1)
    """how large"""


def test_a_list_default_is_not_shared():
    assert Sample().words == Sample().words == ["a"]
    assert Sample().words is not Sample().words


def test_the_help_of_a_field_is_the_docstring_below_it():
    texts = {"words": "some words", "count": "how many, in a text that has two lines"}
    assert field_help(Sample) == texts
    assert field_help(Extended) == texts | {"size": "how large"}


def test_an_installation_without_sources_says_where_a_field_is_described(monkeypatch):
    def without_source(module):
        raise OSError("could not get source code")

    monkeypatch.setattr(option_module.inspect, "getsource", without_source)
    texts = option_module.docstrings_below_fields.__wrapped__(Sample.__module__)
    assert texts == {}
    entry = Entry("sample", Sample, field=fields(Sample)[2])
    assert entry.advice == "--name is described in docs/config.md"


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
