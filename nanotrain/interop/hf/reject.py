"""The error for a config.json with an unsupported feature: `reject`, `require_values`."""

from collections.abc import Mapping
from typing import Any, NoReturn

from nanotrain.errors import HuggingFaceError


def reject(key: str, value: Any, *, instead: str) -> NoReturn:
    """Raise for an entry of config.json; `instead` is its supported value."""
    why = f"only {instead} is supported; weights trained with another setting would compute something else"
    fix = f"choose a checkpoint whose {key} is {instead}"
    raise HuggingFaceError(f"config.json has {key}: {value!r}", why=why, fix=fix)


def require_values(raw: Mapping[str, Any], required: Mapping[str, Any]) -> None:
    """Check entries of which only one value is supported; a missing one has it, and null is false.

    Raises:
        HuggingFaceError: an entry with another value.
    """
    for key, value in required.items():
        found = raw.get(key, value)
        if found != value and (found or value):
            reject(key, found, instead=str(value).lower())
