"""One `option` per field: its default, its meaning, its flag and what the help says about it."""

from collections.abc import Callable
from dataclasses import Field, field, fields
from typing import Any


def option(default: Any, meaning: str, *, unit: str = "", check: Callable[[Any], bool] | None = None) -> Any:
    """Declare a configuration field; the only way to declare one.

    Args:
        default: the value where nothing says otherwise; the only place where a default stands.
        meaning: one line for `--help` and docs/config.md.
        unit: what a number counts, when the name does not say it.
        check: what a value must satisfy on its own; a failing value is a `ConfigError` naming the flag.
    """
    metadata = {"meaning": meaning, "unit": unit, "check": check}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def options_of(section: Any) -> tuple[Field[Any], ...]:
    """The fields of a section (class or instance) that `option` declared, in order."""
    return tuple(f for f in fields(section) if "meaning" in f.metadata)


def flag_of(name: str) -> str:
    """The flag of a field.

    >>> flag_of("tensor_model_parallel_size")
    '--tensor-model-parallel-size'
    """
    return "--" + name.replace("_", "-")


def at_least(bound: float) -> Callable[[Any], bool]:
    """A check that passes numbers from `bound` on, and None."""

    def holds(value: Any) -> bool:
        return value is None or value >= bound

    holds.__doc__ = f"must be at least {bound}"
    return holds


def above(bound: float) -> Callable[[Any], bool]:
    """A check that passes numbers above `bound`, and None."""

    def holds(value: Any) -> bool:
        return value is None or value > bound

    holds.__doc__ = f"must be above {bound}"
    return holds


def between(low: float, high: float) -> Callable[[Any], bool]:
    """A check that passes numbers in [low, high), and None."""

    def holds(value: Any) -> bool:
        return value is None or low <= value < high

    holds.__doc__ = f"must be at least {low} and below {high}"
    return holds
