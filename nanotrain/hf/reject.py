"""The error for a config.json with an unsupported feature."""

from typing import Any, NoReturn

from nanotrain.errors import HuggingFaceError


def reject(key: str, value: Any, *, instead: str) -> NoReturn:
    """Raise for an entry of config.json; `instead` is its supported value."""
    why = f"only {instead} is supported; weights trained with another setting would compute something else"
    fix = f"choose a checkpoint whose {key} is {instead}"
    raise HuggingFaceError(f"config.json has {key}: {value!r}", why=why, fix=fix)
