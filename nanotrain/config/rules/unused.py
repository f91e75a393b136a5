"""Settings without effect: which fields another field switches off, and what happens to them.

The rows are `config/tables/unused.yaml`, and one per section that a model may not have, for the
fields of its switch. Such a setting is an error, with two exceptions. Where the command line
changes the cause, a setting of a YAML file returns to its default (`+config=tiny
--data-parallel-sharding-strategy no_shard`, where tiny overlaps the parameter gather). What
published scripts of Megatron-LM set without effect (`is_harmless`) returns to its default in any
case. `nanotrain config --explain` names the reason.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from nanotrain.config.config import Config
from nanotrain.config.option import Entry
from nanotrain.config.rules.rule import holds
from nanotrain.config.rules.sizes import Values
from nanotrain.config.schema import (
    ENTRIES,
    KEYS,
    argument_of,
    entries_of,
    flat_values,
    typed,
    value_of,
    walk_sections,
    with_values,
    without_absent,
)
from nanotrain.config.tables import read_table
from nanotrain.errors import ConfigError, ErrorCollector

# fields of absent sections that published scripts of Megatron-LM set
HARMLESS = {
    "rotary_scaling_factor",
    "yarn_correction_range_round_to_int",
    "mscale",
    "mscale_all_dim",
}


@dataclass(frozen=True)
class Unused:
    """Fields without effect under a condition; unused.yaml describes the entries."""

    fields: tuple[str, ...]  # their unique names
    where: str  # the condition
    causes: tuple[str, ...]  # unique names of the fields that decide
    why: str  # the reason
    fix: str = ""  # how the fields get an effect; empty: change the causes
    # published scripts of Megatron-LM set the fields all the same: reset, not refused
    is_harmless: bool = False


@cache
def unused() -> tuple[Unused, ...]:
    """All rows."""
    return (*of_absent_sections(), *of_table())


def of_table() -> Iterator[Unused]:
    """The rows of unused.yaml."""
    for row in read_table("unused"):
        causes = (
            row["causes"].split() if "causes" in row else re.findall(r"(\w+) is ", row["where"])
        )
        lists = {"fields": tuple(row["fields"].split()), "causes": tuple(dict.fromkeys(causes))}
        yield Unused(**(row | lists))


def of_absent_sections() -> Iterator[Unused]:
    """Rows for the sections that a model may not have."""
    for section, field, _ in walk_sections():
        name, value = field.metadata["switch"], field.metadata["value"]
        if not name:
            continue
        switch = KEYS.get(f"{section}.{name}") or KEYS[f"{section.rpartition('.')[0]}.{name}"]
        names = [entry.name for entry in entries_of(section) if entry is not switch]
        off = f"not {value}" if value else "unset" if switch.is_optional else "false"
        for is_harmless in (False, True):
            yield Unused(
                fields=tuple(name for name in names if (name in HARMLESS) is is_harmless),
                where=f"{switch.name} is {off}",
                causes=(switch.name,),
                why=f"it belongs to {switch.name} {value}".rstrip()
                + ", which is unset" * switch.is_optional,
                fix=f"set {switch.flag} {value}".rstrip(),
                is_harmless=is_harmless,
            )


def reset_unused(
    config: Config,
    *,
    explicit: frozenset[str],
    errors: ErrorCollector,
    defaults: frozenset[str] = frozenset(),
    unreadable: frozenset[str] = frozenset(),
) -> tuple[Config, dict[str, str]]:
    """Reset settings of YAML files to their defaults where the command line switched them off.

    Args:
        config: the composed configuration.
        explicit: keys set on the command line.
        errors: collects a ConfigError per setting without effect that the command line did not
            switch off.
        defaults: keys whose value is a default of Megatron-LM, which no one set; they are reset
            too.
        unreadable: unique names of fields whose value could not be read; rules with such a cause
            are left out.

    Returns:
        The configuration, and the origin of each value that was reset.
    """
    values, origins = flat_values(config), dict[str, str]()
    changed = {
        name: values[entry.key]
        for name, entry in ENTRIES.items()
        if values[entry.key] != entry.default
    }
    for rule in unused():
        # of most rules: conditions take several times as long
        if changed.keys().isdisjoint(rule.fields):
            continue
        causes = [ENTRIES[name] for name in rule.causes]
        if not unreadable.isdisjoint(cause.name for cause in causes):
            continue
        # The model section may be read later, from a checkpoint or from config.json of pretrained
        # weights.
        if not config.is_model_known and any(cause.key.startswith("model.") for cause in causes):
            continue
        with errors:
            if not holds(Values(config), rule.where):
                continue
        is_overruled = any(cause.key in explicit for cause in causes)
        for entry in [ENTRIES[name] for name in rule.fields if name in changed]:
            is_reset = (
                rule.is_harmless
                or entry.key in defaults
                or (is_overruled and entry.key not in explicit)
            )
            if not is_reset:
                errors.errors.append(without_effect(config, entry, rule=rule))
                continue
            config = with_values(config, {entry.key: entry.default})
            source = "the command line" if entry.key in explicit else "the YAML"
            source = "Megatron-LM" if entry.key in defaults else source
            origins[entry.key] = (
                f"default, not {source}'s {typed(changed.pop(entry.name))}: {rule.why}"
            )
    return without_absent(config) if config.is_model_known else config, origins


def without_effect(config: Config, entry: Entry, *, rule: Unused) -> ConfigError:
    """The error for a setting without effect."""
    value = value_of(config, entry.key)
    causes = [ENTRIES[cause] for cause in rule.causes]
    change = f"change {' or '.join(cause.flag for cause in causes)}"
    if len(causes) == 1 and causes[0].kind is bool:
        change = f"set {argument_of(causes[0].name, not value_of(config, causes[0].key))}"
    flag = argument_of(entry.name, value) if entry.kind is bool else entry.flag
    fix = f"leave {flag} out or {rule.fix or change}"
    return ConfigError(f"{entry.key} = {typed(value)} has no effect", why=rule.why, fix=fix)
