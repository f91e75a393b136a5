"""Values that a recipe takes from the environment: used as they are, written as the reference.

A key behind `${oc.env:KEY}` must not appear in config.yaml, checkpoints or trackers.
"""

from typing import Any

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

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (str(self), self.reference)


def _restore(value: str, reference: str) -> FromEnvironment:
    return FromEnvironment(value, reference=reference)


def mark_references(resolved: Any, written: Any) -> Any:
    """Resolved values in which each text from the environment keeps its reference.

    Args:
        resolved: plain values after interpolation.
        written: the same before it.
    """
    if isinstance(resolved, dict):
        return {key: mark_references(value, written[key]) for key, value in resolved.items()}
    if isinstance(resolved, list) and isinstance(written, list):
        return [mark_references(*pair) for pair in zip(resolved, written, strict=True)]
    if isinstance(resolved, str) and isinstance(written, str) and MARK in written:
        return FromEnvironment(resolved, reference=written)
    return resolved


def as_written(value: Any) -> Any:
    """A value with its reference in place of what the environment holds."""
    if isinstance(value, list):
        return [as_written(item) for item in value]
    return value.reference if isinstance(value, FromEnvironment) else value
