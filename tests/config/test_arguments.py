"""The tables of arguments agree with the fields and with the parser."""

import pytest

from nanotrain.config.arguments import ALIASES, ARGUMENTS, FLAGS, NEGATIONS, SWITCHES, VALUES
from nanotrain.config.flags import OWN_FLAGS
from nanotrain.config.schema import ENTRIES


def test_every_argument_that_sets_no_field_is_described() -> None:
    described = {text.split()[0].partition("[")[0] for text in ARGUMENTS if text.startswith("--")}
    assert described == {*OWN_FLAGS, *SWITCHES, "--help"}


def test_no_flag_has_two_meanings() -> None:
    tables = (FLAGS, NEGATIONS, ALIASES, SWITCHES, OWN_FLAGS)
    assert len(set().union(*tables)) == sum(map(len, tables))


@pytest.mark.parametrize("flag", ALIASES)
def test_an_alias_stands_for_a_value_of_its_field(flag: str) -> None:
    alias = ALIASES[flag]
    entry = ENTRIES[alias.name]
    allowed = entry.choices or (("true", "false") if entry.kind is bool else (alias.value,))
    assert alias.value in alias.agrees and set(alias.agrees) <= set(allowed)


def test_other_spellings_lead_to_values_of_their_field() -> None:
    for name, spellings in VALUES.items():
        choices = ENTRIES[name].choices
        assert not choices or set(spellings.values()) <= set(choices), name
