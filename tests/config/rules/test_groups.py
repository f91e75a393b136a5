"""Every message of every rule: `messages.json` has settings that break each one, and what is said.

The texts were recorded before the rules became Python. A row of the rules "model.3" has all errors
of that group for its settings, in their order; one of "unused.FIELD.3" also what is reset.
"""

import json
from pathlib import Path
from typing import Any

from nanotrain.config.config import Config
from nanotrain.config.rules import groups
from nanotrain.config.rules.check import check_rules
from nanotrain.config.rules.settings import Settings
from nanotrain.config.rules.unused import UNUSED, absent_sections, reset_unused
from nanotrain.config.schema import ENTRIES
from nanotrain.errors import ErrorCollector
from nanotrain.plan.compile import describe_compile, graph_breaks
from tests.config.asking import config_of

ROWS = json.loads(Path(__file__).with_name("messages.json").read_text())


def rows(*kinds: str) -> list[tuple[str, Config, dict[str, Any]]]:
    """The rows of some kinds: rule, configuration and what is expected."""
    return [
        (row["rule"], config_of(**row["settings"]), row)
        for row in ROWS
        if row["rule"].partition(".")[0] in kinds
    ]


def test_every_contradiction_has_its_message() -> None:
    for rule, config, row in rows(*groups.GROUPS):
        errors = ErrorCollector()
        check_rules(config, rule.partition(".")[0], errors=errors)
        assert [str(error) for error in errors.errors] == row["errors"], rule


def test_every_field_without_effect_has_its_reason() -> None:
    for rule, config, row in rows("unused"):
        errors = ErrorCollector()
        _, origins = reset_unused(config, explicit=frozenset(), errors=errors)
        assert [str(error) for error in errors.errors] == row["errors"], rule
        assert origins == row["resets"], rule


def test_every_note_on_compilation_is_said() -> None:
    for rule, config, row in rows("compile"):
        assert graph_breaks(config) == row["breaks"], rule
        assert describe_compile(config, "cuda") == row["note"], rule


def test_fields_without_effect_and_their_causes_exist() -> None:
    for _, config, _ in rows("unused"):
        for rules in (absent_sections, *UNUSED):
            for row in rules(Settings(config)):
                assert {*row.fields, *row.causes} <= ENTRIES.keys(), row


def test_all_rules_are_recorded() -> None:
    recorded = {row["rule"].partition(".")[0] for row in ROWS}
    assert recorded == {*groups.GROUPS, "unused", "compile", "megatron"}
    broken = set()
    for _, config, _ in rows(*groups.GROUPS, "unused"):
        for rules in (*sum(groups.GROUPS.values(), ()), *UNUSED):
            if any(True for _ in rules(Settings(config))):
                broken.add(rules)
    assert broken == {*sum(groups.GROUPS.values(), ()), *UNUSED}
