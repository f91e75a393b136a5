"""Settings that would do nothing (idle_rules.py lists them): nothing is skipped in silence.

A field that another one makes idle is an error, unless the words of the command line put a setting of a YAML file out
of play (`+config=tiny --data-parallel-sharding-strategy no_shard`, where tiny overlaps the parameter gather). Then the
field goes back to its default, and `nanotrain config --explain` says why.
"""

from dataclasses import dataclass

from nanotrain.config.config import Config
from nanotrain.config.idle_rules import RULES, Idle
from nanotrain.config.schema import ENTRIES, KEYS, Entry, plain, value_of, with_values
from nanotrain.errors import ConfigError


@dataclass(frozen=True)
class Settled:
    """A configuration without idle settings, and the origin of each value that was put back to its default."""

    config: Config
    origins: dict[str, str]


def settle_idle(config: Config, *, explicit: frozenset[str]) -> Settled:
    """Put settings of YAML files that the command line overruled back to their defaults.

    Args:
        config: the composed configuration.
        explicit: keys set on the command line.

    Raises:
        ConfigError: a setting without effect that nothing on the command line overruled.
    """
    origins: dict[str, str] = {}
    for rule in RULES:
        if not rule.holds(config):
            continue
        overruled = any(ENTRIES[cause].key in explicit for cause in rule.causes)
        for entry in (ENTRIES[name] for name in rule.names):
            value = value_of(config, entry.key)
            if value == entry.default:
                continue
            if entry.key in explicit or not overruled:
                raise without_effect(entry, rule, value=value)
            config = with_values(config, {entry.key: entry.default})
            origins[entry.key] = f"default, not the YAML's {plain(value)}: {rule.why}"
    return Settled(config, origins)


def check_idle(config: Config) -> None:
    """Every setting that is not a default has an effect."""
    settle_idle(config, explicit=frozenset(KEYS))


def without_effect(entry: Entry, rule: Idle, *, value: object) -> ConfigError:
    """The error for a setting that would do nothing."""
    causes = " or ".join(ENTRIES[cause].flag for cause in rule.causes)
    return ConfigError(
        f"{entry.key} = {plain(value)} has no effect",
        why=rule.why,
        fix=f"leave {entry.flag} out or {rule.cure or f'change {causes}'}",
    )
