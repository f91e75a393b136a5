"""Rules as data: conditions, texts, and the check of a table of rules."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from operator import gt, lt
from string import Formatter
from typing import Any

from nanotrain.config.config import Config
from nanotrain.config.rules.sizes import Unreadable, Values
from nanotrain.config.schema import typed
from nanotrain.config.tables import read_table
from nanotrain.errors import ConfigError, ErrorCollector
from nanotrain.quantities import count_of, round_up


@dataclass(frozen=True)
class Rule:
    """Values that are an error together; config/tables/contradictions.yaml describes the form of
    the texts.
    """

    where: str  # the condition
    what: str  # the fact
    why: str  # the reason
    fix: str  # the cure


def holds(values: Values, where: str) -> bool:
    """Whether a condition of a table holds."""
    return any(
        all(_is_met(values, term) for term in terms.split(" and ")) for terms in where.split(" or ")
    )


def _is_met(values: Values, term: str) -> bool:
    """Whether one term of a condition holds.

    >>> _is_met(Values(Config()), "optimizer is not sgd, lion"), _is_met(Values(Config()), "min_lr is above lr")
    (True, False)
    """
    name, includes, item = term.partition(" includes ")
    if includes:
        return item in values[name]
    name, _, expected = term.partition(" is ")
    is_negated, expected = expected.startswith("not "), expected.removeprefix("not ")
    for words, compare in COMPARISONS.items():
        if expected.startswith(words):
            bound = expected.removeprefix(words)
            value, limit = values[name], values[bound] if bound.isidentifier() else float(bound)
            return None not in (value, limit) and compare(value, limit) != is_negated
    return (typed(values[name]) in expected.split(", ")) != is_negated


COMPARISONS = {"above ": gt, "below ": lt, "a multiple of ": lambda value, unit: value % unit == 0}


class Text(Formatter):
    """A text of a rule with its values: as they are typed, as a count (`# layer|is`) or as the next
    multiple.

    >>> Text().vformat("{num_layers:# layer|has} {seq_length:multiple of 100}", (), Values(Config()))
    '4 layers have 300'
    """

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec.startswith("# "):
            noun, _, verb = format_spec.removeprefix("# ").partition("|")
            return count_of(value, noun, verb=verb)
        if format_spec.startswith("multiple of "):
            return str(round_up(value, int(format_spec.removeprefix("multiple of "))))
        return format(value, format_spec) if format_spec else typed(value)


@cache
def contradictions(group: str) -> tuple[Rule, ...]:
    """The rules of a group of contradictions.yaml: model, run, layout, start, cpu or cuda."""
    return tuple(Rule(**row) for row in read_table("contradictions")[group])


def check_rules(
    config: Config,
    rules: Iterable[Rule],
    *,
    errors: ErrorCollector,
    unreadable: frozenset[str] = frozenset(),
) -> None:
    """Check every rule of a table, but those on fields that could not be read; errors are
    collected.
    """
    values: Any = Values(config, unreadable)  # which the formatter takes for a mapping
    for rule in rules:
        # a condition or a text may itself find a pattern of layers invalid
        with errors, suppress(Unreadable):
            if holds(values, rule.where):
                what, why, fix = (
                    Text().vformat(text, (), values) for text in (rule.what, rule.why, rule.fix)
                )
                raise ConfigError(what, why=why, fix=fix)
