"""Merge the settings of a command line into the values of the files, and replace `${...}`."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nanotrain.config.command_line import Setting
from nanotrain.config.config import Config
from nanotrain.config.references import ENVIRONMENT, mark_references
from nanotrain.config.schema import KEYS, convert, flat_values, nest, typed
from nanotrain.config.user_paths import with_variables
from nanotrain.errors import ConfigError

MAX_RESOLVED = 10**8  # characters; an estimate from above
_OF_A_FIELD = re.compile(
    r"\$\{(?!\s*oc\.env\s*:)"
)  # a variable has one value, and refers to nothing
HIDDEN = "\0hidden\0"  # in place of a hidden value
MARKER = "nanotrain.environment"  # resolver in place of oc.env
OmegaConf.register_new_resolver(MARKER, lambda *_: ENVIRONMENT, replace=True)


def merge_settings(
    values: Mapping[str, Any],
    settings: Sequence[Setting],
    *,
    defaults: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Merge settings of the command line into the values of the files, in order.

    Args:
        values: values of the files, by key.
        settings: settings of the command line.
        defaults: values in place of the fields' own defaults, by key.

    Returns:
        Values by key, without interpolations; fields that are left out have their defaults.
    """
    defaults = defaults or {}
    merged = {**defaults, **values}
    for setting in settings:
        if not setting.is_deletion:
            value = parse_value(setting)
            merged[setting.key] = with_variables(value) if KEYS[setting.key].is_path else value
            continue
        require_value(setting, merged)
        merged.pop(setting.key, None)
        if setting.key in defaults:
            merged[setting.key] = defaults[setting.key]
    merged = {key: merged[key] for key in KEYS if key in merged}  # mistakes are in this order
    if "${" not in str(merged):
        return merged  # OmegaConf takes 15 ms
    return resolve(merged, settings=settings)


def require_value(setting: Setting, merged: Mapping[str, Any]) -> None:
    """Check that a field has the value that `~key=value` names, as Hydra does.

    Raises:
        ConfigError: it has another one.
    """
    if not setting.value:
        return
    entry = KEYS[setting.key]
    current = convert(entry, merged.get(setting.key, entry.default))
    if convert(entry, setting.value) != current:
        raise ConfigError(
            f"{setting.text} deletes nothing",
            why=f"{setting.key} is {typed(current)}",
            fix=f"write ~{setting.key} for any value",
        )


def resolve(merged: Mapping[str, Any], *, settings: Sequence[Setting]) -> dict[str, Any]:
    """Values by key with their `${...}` replaced.

    Raises:
        ConfigError: a reference that leads nowhere, or back to itself.
    """
    written = nest({**flat_values(Config()), **merged})
    require_short(written)
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(written), resolve=True)
        sources = OmegaConf.to_container(OmegaConf.create(with_sources(merged)), resolve=True)
    except OmegaConfBaseException as error:
        raise interpolation_error(error, settings) from None
    for key in merged:
        if not KEYS[key].secret and HIDDEN in str(nested_value(sources, key)):
            raise ConfigError(
                f"{key} refers to a hidden value",
                why="it would be written into logs, trackers and checkpoints",
                fix="write another value",
            )
    marked = mark_references(resolved, written, sources=sources)
    return {key: nested_value(marked, key) for key in merged}


def require_short(written: Mapping[str, Any]) -> None:
    """Check that values with their references replaced have at most MAX_RESOLVED characters.

    A few fields that each name the one before several times stand for billions.

    Raises:
        ConfigError: they may have more.
    """
    longest = 1
    copies = 1
    for text in texts_in(written):
        longest = max(longest, len(text))
        copies *= max(1, len(_OF_A_FIELD.findall(text)))
    if longest * copies > MAX_RESOLVED:
        raise ConfigError(
            "the references of the configuration stand for too long texts",
            why=f"they may have {longest * copies:,} characters, at most {MAX_RESOLVED:,} are read",
            fix="write the values",
        )


def texts_in(value: Any) -> Iterator[str]:
    """The texts in nested values."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from texts_in(item)
    elif isinstance(value, str):
        yield value


def with_sources(merged: Mapping[str, Any]) -> dict[str, Any]:
    """The values before interpolation; secrets and environment variables are marked.

    What refers to them, also by way of other fields, has the mark after interpolation.
    """
    marked = dict(merged)
    for key, value in merged.items():
        if KEYS[key].secret and value is not None:
            marked[key] = f"{HIDDEN}{value}"
    return nest({**flat_values(Config()), **map_texts(marked, mark_environment)})


def mark_environment(text: str) -> str:
    """A text that refers to the mark in place of a variable of the environment."""
    return re.sub(r"\$\{\s*oc\.env\s*:", f"${{{MARKER}:", text)


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Nested values with every text changed."""
    if isinstance(value, dict):
        return {key: map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [map_texts(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def nested_value(values: Any, key: str) -> Any:
    """The value of a dotted key in nested mappings."""
    for name in key.split("."):
        values = values[name]
    return values


def interpolation_error(error: OmegaConfBaseException, settings: Sequence[Setting]) -> ConfigError:
    """The error of a `${...}` that cannot be replaced by a value."""
    reason = str(error).splitlines()[0]
    if "Recursive" in reason:
        return ConfigError(
            f"the value of {error.full_key or 'a field'} refers to itself",
            why="${...} of several fields lead back to it",
            fix="give one of them a value",
        )
    missing = re.findall("'([^']+)'", reason)
    texts = [setting.text for setting in settings if refers_to(setting.text, missing)]
    subject = ", ".join(texts) or error.full_key or "a value"
    what = f"{subject} refers to a value that cannot be found"
    if "Environment variable" in reason:
        return ConfigError(
            what,
            why=f"{missing[0]} is not in the environment",
            fix=f"export it, or write ${{oc.env:{missing[0]},DEFAULT}}",
        )
    return ConfigError(
        what,
        why=reason,
        fix="replace the variable before the program starts, or write ${oc.env:NAME} for one of "
        "the environment",
    )


def refers_to(text: str, names: Sequence[str]) -> bool:
    """Whether a text ends a `${...}` with one of the names."""
    return any(f"{name}}}" in text for name in names)


def parse_value(setting: Setting) -> Any:
    """The value of a setting.

    The text of a flag is the value. An override has lists and quotes by Hydra's grammar.
    """
    if not setting.is_hydra or not isinstance(setting.value, str):
        return setting.value
    if not setting.value:
        raise ConfigError(
            f"{setting.text} has no value", why="it takes one", fix=f"write {setting.key}=VALUE"
        )
    if setting.value[0] not in "['\"":
        return setting.value
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(setting.text).value()
    except HydraException as error:
        raise ConfigError(
            f"{setting.text} cannot be read",
            why=str(error).splitlines()[0],
            fix=f"close quotes and brackets, or write {KEYS[setting.key].flag} VALUE",
        ) from None
