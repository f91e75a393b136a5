"""What a message says to do cures what it says is wrong; what it needs, it needs.

cure        each alternative of "set --flag VALUE" and "leave --flag out" removes the error
sound       what it says to set breaks no rule that was kept, but for rows of `SECOND_STEPS`
necessary   without any one setting of a recorded contradiction its errors are not the same
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanotrain.config.rules import groups
from nanotrain.config.rules.check import check_rules
from nanotrain.config.rules.unused import reset_unused
from nanotrain.config.schema import ENTRIES, convert
from nanotrain.errors import ConfigError, ErrorCollector
from tests.config.asking import config_of

ROWS = json.loads(Path(__file__).with_name("messages.json").read_text())
SET = re.compile(
    r"set (--[a-z0-9-]+ (?!and\b|instead\b)[^\s,;]+(?: and --[a-z0-9-]+ [^\s,;]+)*)(?! without)"
)
# rows whose cure leads to a second message, with a cure of its own
SECOND_STEPS = {
    "model.16",  # one expert per token needs another softmax
    "model.58",
    "run.40",  # outer sharding needs instances too
    "layout.29",  # the lengths of the ends, and then of the stages between
    "layout.53",  # fp8 sizes follow from the layout
    "unused.moe_divide_global_aux_loss_by_dp.8",  # of a model without experts
    "unused.moe_divide_global_aux_loss_by_dp.57",
}
PAIR = re.compile(r"--([a-z0-9-]+) ([^\s,;]+)")
LEFT_OUT = re.compile(r"leave (?:out )?((?:--[a-z0-9-]+(?:, | or |, or )?)+)")
FLAG = re.compile(r"--([a-z0-9-]+)")


def errors_of(kind: str, settings: dict[str, Any]) -> list[ConfigError]:
    """The errors of the rules of one kind."""
    errors = ErrorCollector()
    config = config_of(**settings)
    if kind == "unused":
        reset_unused(config, explicit=frozenset(), errors=errors)
    else:
        check_rules(config, kind, errors=errors)
    return [error for error in errors.errors if isinstance(error, ConfigError)]


def name_of(flag: str) -> str | None:
    name = flag.removeprefix("no-").replace("-", "_")
    return name if name in ENTRIES else None


def cures(error: ConfigError, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The settings after each alternative of a cure that names its value."""
    for match in SET.finditer(error.fix):
        changed = dict(settings)
        for flag, text in PAIR.findall(match[1]):
            name = name_of(flag)
            if name is None:
                break
            try:
                changed[name] = convert(
                    ENTRIES[name], json.loads(text) if text[0].isdigit() else text
                )
            except (ConfigError, ValueError, TypeError):
                break
        else:
            yield changed
    for match in LEFT_OUT.finditer(error.fix):
        for flag in FLAG.findall(match[1]):
            name = name_of(flag)
            if name is not None and name in settings:
                yield {key: value for key, value in settings.items() if key != name}


def rows() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The name, kind and settings of the recorded rows."""
    for row in ROWS:
        kind = row["rule"].partition(".")[0]
        if kind in {*groups.GROUPS, "unused"}:
            yield row["rule"], kind, row["settings"]


def test_every_cure_that_names_a_value_removes_its_error() -> None:
    num_cures = 0
    for rule, kind, settings in rows():
        before = errors_of(kind, settings)
        known = {(error.what, error.why) for error in before}
        for error in before:
            for changed in cures(error, settings):
                num_cures += 1
                after = errors_of(kind, changed)
                # the number in a text may have changed, not what is wrong
                start = error.what.split()[:2]
                same = [one for one in after if one.what.split()[:2] == start]
                left = [one for one in same if one.why == error.why]
                assert not left, f"{rule}: {error.fix} leaves {left[0]}"
                if rule not in SECOND_STEPS:
                    new = [one for one in after if (one.what, one.why) not in known]
                    assert not new, f"{rule}: {error.fix} leads to {new[0]}"
    assert num_cures > 440


def test_every_setting_of_a_contradiction_is_needed() -> None:
    for rule, kind, settings in rows():
        if kind == "unused":
            continue
        before = {str(error) for error in errors_of(kind, settings)}
        for name in settings:
            fewer = {key: value for key, value in settings.items() if key != name}
            after = {str(error) for error in errors_of(kind, fewer)}
            assert before != after, f"{rule}: without {name} it is the same"
