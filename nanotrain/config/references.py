"""Values that a recipe takes from the environment: used as they are, written as the reference.

A key behind `${oc.env:KEY}` must not appear in config.yaml, checkpoints, trackers or errors.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from nanotrain.errors import ConfigError

SHORTEST = 4  # characters of a value that is looked for in a message

MARK = "${oc.env:"
ENVIRONMENT = "\0environment\0"  # in place of the value of a variable


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
        """The arguments that pickle passes to `__new__`."""
        return (str(self),), {"reference": self.reference}


def mark_references(resolved: Any, written: Any, *, sources: Any) -> Any:
    """Resolved values in which each text from the environment keeps its reference.

    Args:
        resolved: plain values after interpolation.
        written: plain values before interpolation.
        sources: plain values after interpolation, with ENVIRONMENT in place of variables.
    """
    if isinstance(resolved, dict):
        marked = {}
        for key, value in resolved.items():
            marked[key] = mark_references(value, written[key], sources=sources[key])
        return marked
    if isinstance(resolved, list):
        texts = written if isinstance(written, list) else [written] * len(resolved)
        rows = zip(resolved, texts, sources, strict=True)
        return [mark_references(value, text, sources=source) for value, text, source in rows]
    if isinstance(resolved, str) and ENVIRONMENT in str(sources):
        return FromEnvironment(resolved, reference=str(written))
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
    hide = partial(text_without_values, values=values)
    return type(error)(hide(error.what), why=hide(error.why), fix=hide(error.fix))


def text_without_values(text: str, *, values: Any) -> str:
    """A text with references in place of environment values, as `without_values`."""
    # a value that is a part of another one is replaced after it
    for value in sorted(marked_values(values), key=len, reverse=True):
        for form in (str(value), repr(str(value))[1:-1]):
            text = text.replace(form, value.reference)
    return text


def marked_values(values: Any) -> Iterator[FromEnvironment]:
    """The texts from the environment in nested lists and dicts, without the shortest."""
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list):
        for value in values:
            yield from marked_values(value)
    elif isinstance(values, FromEnvironment) and len(values) >= SHORTEST:
        yield values
