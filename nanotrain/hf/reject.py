"""The one way to say that a config.json asks for a feature this code does not have."""

from typing import Any, NoReturn

from nanotrain.errors import HuggingFaceError


def reject(key: str, value: Any, *, instead: str) -> NoReturn:
    """Raise for a value of config.json.

    Args:
        key: the entry.
        value: what it says.
        instead: what it would have to say.
    """
    raise HuggingFaceError(
        f"config.json says {key}: {value!r}",
        why=f"only {instead} can be trained here; weights trained with another setting would compute something else",
        fix=f"choose a checkpoint whose {key} is {instead}",
    )
