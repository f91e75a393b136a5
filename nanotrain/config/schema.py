"""The fields of the configuration as a table, and values poured into them.

`ENTRIES` holds every field once, by its name; `config_from_dict` is the only way from plain values (YAML, JSON, text
of a flag) to a `Config`, and `to_dict` the way back. A value may come as text: the field's type says what it means.
"""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from enum import Enum
from typing import Any, get_args, get_origin

from nanotrain.config.config import Config
from nanotrain.config.option import flag_of, options_of
from nanotrain.errors import ConfigError

SECTIONS: dict[str, Any] = {field.name: field.default_factory for field in fields(Config)}  # name -> its class


@dataclass(frozen=True)
class Entry:
    """One field: where it stands, what it means and what it takes."""

    section: str
    field: Field[Any]

    @property
    def name(self) -> str:
        """The field's name, unique over all sections."""
        return self.field.name

    @property
    def key(self) -> str:
        """The field in Hydra's form, `section.field`."""
        return f"{self.section}.{self.name}"

    @property
    def flag(self) -> str:
        """The field's flag."""
        return flag_of(self.name)

    @property
    def is_optional(self) -> bool:
        """Whether the field may be unset."""
        return type(None) in get_args(self.field.type)

    @property
    def kind(self) -> Any:
        """The type of a value that is not None: bool, int, float, str, list or an Enum."""
        if get_origin(self.field.type) is list:
            return list
        return next((kind for kind in get_args(self.field.type) if kind is not type(None)), self.field.type)

    @property
    def choices(self) -> tuple[str, ...]:
        """The spellings of an enum's values."""
        return tuple(member.value for member in self.kind) if issubclass(self.kind, Enum) else ()

    @property
    def default(self) -> Any:
        """The value where nothing says otherwise."""
        factory = self.field.default_factory
        return self.field.default if factory is MISSING else factory()


ENTRIES: dict[str, Entry] = {
    field.name: Entry(name, field) for name, section in SECTIONS.items() for field in options_of(section)
}
KEYS: dict[str, Entry] = {entry.key: entry for entry in ENTRIES.values()}


def config_from_dict(values: Mapping[str, Any]) -> Config:
    """Pour `{section: {field: value}}` into a `Config`; what is not named keeps its default.

    Raises:
        ConfigError: an unknown section or field, or a value of the wrong type or out of bounds.

    >>> config_from_dict({"optim": {"lr": "2e-4", "lr_decay_style": "inverse-square-root"}}).optim.lr
    0.0002
    """
    check_names(values)
    sections = {
        name: section(
            **{field: convert(KEYS[f"{name}.{field}"], value) for field, value in (values.get(name) or {}).items()}
        )
        for name, section in SECTIONS.items()
    }
    return Config(**sections)


def check_names(values: Mapping[str, Any]) -> None:
    """Every section and field is one that exists."""
    for name, section in values.items():
        if name not in SECTIONS:
            raise unknown("section", name, known=SECTIONS)
        if not isinstance(section, Mapping | None):
            raise ConfigError(f"section {name} is {section!r}", why="a section holds fields", fix=f"write {name}.FIELD")
        for field in section or {}:
            if f"{name}.{field}" not in KEYS:
                raise unknown("key", f"{name}.{field}", known=KEYS)


def convert(entry: Entry, value: Any) -> Any:
    """The value of a field from a plain value or its text, checked on its own."""
    if value is None or (isinstance(value, str) and value.lower() in ("null", "none") and entry.is_optional):
        if not entry.is_optional:
            raise wrong_type(entry, "null")
        return None
    result = CONVERSIONS[Enum if entry.choices else entry.kind](entry, value)
    check = entry.field.metadata["check"]
    if check is not None and not check(result):
        raise ConfigError(
            f"{entry.key} is {result}",
            why=f"it {check.__doc__}",
            fix=f"{entry.flag} is {entry.field.metadata['meaning']}",
        )
    return result


def convert_bool(entry: Entry, value: Any) -> bool:
    """true or false, yes or no, on or off, 1 or 0."""
    words = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False, "1": True, "0": False}
    if isinstance(value, bool):
        return value
    if str(value).lower() not in words:
        raise wrong_type(entry, value)
    return words[str(value).lower()]


def convert_int(entry: Entry, value: Any) -> int:
    """Whole numbers, also written 1_000 or 1e4."""
    number = convert_float(entry, value)
    if number != int(number):
        raise wrong_type(entry, value)
    return int(value) if isinstance(value, int) or str(value).lstrip("+-").isdigit() else int(number)


def convert_float(entry: Entry, value: Any) -> float:
    """A finite number."""
    if isinstance(value, bool):
        raise wrong_type(entry, value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise wrong_type(entry, value) from None
    if not math.isfinite(number):
        raise wrong_type(entry, value)
    return number


def convert_str(entry: Entry, value: Any) -> str:
    """Text; a number in YAML is taken as it reads."""
    if isinstance(value, Mapping | list | tuple):
        raise wrong_type(entry, value)
    return str(value)


def convert_list(entry: Entry, value: Any) -> list[str]:
    """A list of words, or one text of several."""
    if isinstance(value, Mapping):
        raise wrong_type(entry, value)
    if isinstance(value, list | tuple):
        return [convert_str(entry, item) for item in value]
    return str(value).split()


def convert_enum(entry: Entry, value: Any) -> Enum:
    """A member by the spelling of its value."""
    text = value.value if isinstance(value, Enum) else str(value)
    if text not in entry.choices:
        raise ConfigError(
            f"{entry.key} is {text!r}",
            why=f"it takes one of {', '.join(entry.choices)}",
            fix=did_you_mean(text, entry.choices, prefix=f"{entry.flag} "),
        )
    member: Enum = entry.kind(text)
    return member


CONVERSIONS = {
    bool: convert_bool,
    int: convert_int,
    float: convert_float,
    str: convert_str,
    list: convert_list,
    Enum: convert_enum,
}
TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list of words"}


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Every section as plain values (enums by their value), the inverse of `config_from_dict`."""
    return {
        name: {entry.name: plain(getattr(getattr(config, name), entry.name)) for entry in entries_of(name)}
        for name in SECTIONS
    }


def plain(value: Any) -> Any:
    """A value as YAML and JSON know it."""
    if isinstance(value, Enum):
        return value.value
    return list(value) if isinstance(value, list) else value


def entries_of(section: str) -> list[Entry]:
    """The fields of one section, in order."""
    return [entry for entry in ENTRIES.values() if entry.section == section]


def unknown(what: str, name: str, *, known: Iterable[str]) -> ConfigError:
    """The error for a name that does not exist."""
    why = "there is no such " + what
    return ConfigError(f"unknown {what} {name}", why=why, fix=did_you_mean(name, known))


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """The nearest known name as advice, or where to look.

    >>> did_you_mean("optim.lrr", ["optim.lr", "train.seed"])
    'did you mean optim.lr?'
    """
    cutoff = 0.5 if len(name) < 6 else 0.6  # one slip in four letters leaves 0.5; so do two long flags without kinship
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {prefix}{close[0]}?" if close else "see --help"


def wrong_type(entry: Entry, value: Any) -> ConfigError:
    """The error for a value the field cannot take."""
    expected = TYPE_NAMES.get(entry.kind) or f"one of {', '.join(entry.choices)}"
    return ConfigError(
        f"{entry.key} is {value!r}",
        why=f"it takes {expected}",
        fix=f"{entry.flag} is {entry.field.metadata['meaning']}",
    )
