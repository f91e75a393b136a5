"""Values that a recipe takes from the environment: used as they are, written as the reference.

A key behind `${oc.env:KEY}` must not appear in config.yaml, checkpoints, trackers or errors.
"""

from collections.abc import Iterator
from typing import Any

from nanotrain.errors import ConfigError

SHORTEST = 4  # characters of a value that is looked for in a message

MARK = "${oc.env:"


class FromEnvironment(str):
    """A text with the reference that it was resolved from.

    >>> FromEnvironment("secret", reference="${oc.env:KEY}").reference
    '${oc.env:KEY}'
    """

    reference: str

    def __new__(cls, value: str, *, reference: str) -> "FromEnvironment":
        text = super().__new__(cls, value)
        text.reference = reference
        return text

    def __getnewargs_ex__(self) -> tuple[tuple[str], dict[str, str]]:
        """What pickle passes to `__new__`."""
        return (str(self),), {"reference": self.reference}


def mark_references(resolved: Any, written: Any) -> Any:
    """Resolved values in which each text from the environment keeps its reference.

    Args:
        resolved: plain values after interpolation.
        written: plain values before interpolation.
    """
    if isinstance(resolved, dict):
        return {key: mark_references(value, written[key]) for key, value in resolved.items()}
    if isinstance(resolved, list) and isinstance(written, list):
        return [mark_references(*pair) for pair in zip(resolved, written, strict=True)]
    if isinstance(resolved, str) and isinstance(written, str) and MARK in written:
        return FromEnvironment(resolved, reference=written)
    return resolved


def as_written(value: Any) -> Any:
    """A value in the types of YAML and JSON, with references in place of environment values."""
    if isinstance(value, list):
        return [as_written(item) for item in value]
    if isinstance(value, FromEnvironment):
        return value.reference
    return value


def without_values(error: ConfigError, values: Any) -> ConfigError:
    """An error with references in place of environment values.

    Args:
        error: one mistake.
        values: nested lists and dicts in which texts from the environment are marked.
    """
    # a value that is a part of another one is replaced after it
    hidden = sorted(marked_values(values), key=len, reverse=True)

    def hide(text: str) -> str:
        for value in hidden:
            for form in (str(value), repr(str(value))[1:-1]):
                text = text.replace(form, value.reference)
        return text

    return type(error)(hide(error.what), why=hide(error.why), fix=hide(error.fix))


def marked_values(values: Any) -> Iterator[FromEnvironment]:
    """The texts from the environment in nested lists and dicts, without the shortest."""
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list):
        for value in values:
            yield from marked_values(value)
    elif isinstance(values, FromEnvironment) and len(values) >= SHORTEST:
        yield values
