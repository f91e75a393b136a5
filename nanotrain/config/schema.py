"""The fields of the configuration as a table, and conversion between plain values and a `Config`.

ENTRIES, KEYS      every field, by its unique name ("moe_router_topk") and by its key ("model.moe.router_topk")
config_from_dict   plain values (YAML, JSON, text of a flag) -> Config
to_dict            Config -> plain values
with_values        a Config with some fields changed
check_choice       refuse a name that a table does not hold
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, fields, replace
from functools import cache
from typing import Any

from nanotrain.config.config import Config
from nanotrain.config.option import Entry
from nanotrain.config.references import MARK, FromEnvironment, as_written
from nanotrain.config.suggest import advise, cure_of, did_you_mean, nearest_choice, other_value
from nanotrain.errors import ConfigError, ErrorCollector
from nanotrain.paths import expanded
from nanotrain.storage.remote import is_address, parse
from nanotrain.untrusted import LARGEST


def walk_sections(
    kind: Any = Config, *, path: str = "", prefix: str = ""
) -> Iterator[tuple[str, Field[Any], str]]:
    """Dotted name, field and flag prefix of every section below `kind`, nested ones after their
    parent.
    """
    for field in fields(kind):
        if inner := field.metadata.get("section"):
            name, inner_prefix = f"{path}{field.name}", prefix + field.metadata["prefix"]
            yield name, field, inner_prefix
            yield from walk_sections(inner, path=f"{name}.", prefix=inner_prefix)


SECTIONS: dict[str, Any] = {name: field.metadata["section"] for name, field, _ in walk_sections()}
ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for section, parent, prefix in walk_sections()
    for entry in (
        Entry(section, parent.metadata["section"], field=field, prefix=prefix)
        for field in fields(parent.metadata["section"])
        if "section" not in field.metadata
    )
}
KEYS: dict[str, Entry] = {entry.key: entry for entry in ENTRIES.values()}
# fields of earlier versions that changed no value: ignored where a stored configuration has them
REMOVED = frozenset({"parallel.projection_fusion"})


def config_from_dict(values: Mapping[str, Any]) -> Config:
    """Convert `{section: {field: value}}` into a `Config`; fields that are not named keep their
    defaults.

    Raises:
        ConfigError: unknown sections or fields, values of the wrong type or out of bounds; all of
            them in one error.

    >>> config_from_dict({"optim": {"lr": "2e-4", "lr_decay_style": "inverse-square-root"}}).optim.lr
    0.0002
    """
    errors = ErrorCollector()
    config, _ = read_config(dict(flatten(values, errors=errors)), errors=errors)
    errors.raise_errors()
    return config


def read_config(
    values: Mapping[str, Any], *, errors: ErrorCollector, files: Mapping[str, str] | None = None
) -> tuple[Config, frozenset[str]]:
    """Convert values by key into a `Config`; mistakes are collected in `errors`.

    Args:
        values: plain values by key.
        errors: collects values that cannot be converted.
        files: the file of a key, which its error names.

    Returns:
        The configuration, and the keys whose value cannot be read; they keep their defaults.
    """
    files = files or {}
    converted: dict[str, Any] = {}
    for key, value in values.items():
        with errors:
            try:
                converted[key] = convert(KEYS[key], value)
            except ConfigError as error:
                where = f" in {files[key]}" if key in files else ""
                raise error.with_note(where) from None
    config: Config = build_section(Config, converted)
    return config, frozenset(values.keys() - converted.keys())


def build_section(kind: Any, converted: Mapping[str, Any], *, path: str = "") -> Any:
    """An instance of a section, with its fields from converted values by key.

    A nested section whose switch is off is None, unless one of its fields is set: `reset_unused`
    refuses or resets it.
    """
    values = {}
    for field in _fields(kind):
        key = f"{path}{field.name}"
        if key in converted:
            values[field.name] = converted[key]
        elif "section" in field.metadata:
            values[field.name] = build_section(field.metadata["section"], converted, path=f"{key}.")
    section = kind(**values)
    unset = [
        field.name
        for field in _fields(kind)
        if _is_off(section, field) and values[field.name] == field.metadata["section"]()
    ]
    return replace(section, **dict.fromkeys(unset)) if unset else section


def without_absent(config: Any) -> Any:
    """The configuration (or section) with None for every section whose switch is off."""
    inner: dict[str, Any] = {}
    for field in _fields(config.__class__):
        section = getattr(config, field.name)
        if "section" in field.metadata and section is not None:
            kept = None if _is_off(config, field) else without_absent(section)
            if kept is not section:
                inner[field.name] = kept
    return replace(config, **inner) if inner else config


def _is_off(section: Any, field: Field[Any]) -> bool:
    """Whether a field is a nested section that its switch turns off."""
    name, value = field.metadata.get("switch"), field.metadata.get("value")
    if not name:
        return False
    switch = getattr(section if hasattr(section, name) else _inner(section, field.name), name)
    return bool(switch != value if value else not switch)


def flatten(
    values: Mapping[str, Any], *, errors: ErrorCollector, path: str = ""
) -> Iterator[tuple[str, Any]]:
    """Key and value of every field in nested mappings; unknown names are collected in `errors`."""
    for name, value in values.items():
        key = f"{path}{name}"
        if entry := entry_of(key):
            yield entry.key, value
        elif key not in SECTIONS:
            if key not in REMOVED:
                errors.errors.append(unknown_key(key))
        elif isinstance(value, Mapping | None):
            yield from flatten(value or {}, errors=errors, path=f"{key}.")
        else:
            fix = f"write {key}.FIELD"
            errors.errors.append(
                ConfigError(f"section {key} is {value!r}", why="a section holds fields", fix=fix)
            )


def entry_of(key: str) -> Entry | None:
    """The field of a key; a nested section may be left out, as in files written before it existed.

    >>> entry_of("model.moe_router_topk").key, entry_of("optim.fp8_format")
    ('model.moe.router_topk', None)
    """
    section, _, name = key.rpartition(".")
    entry = ENTRIES.get(name)
    is_inside = entry is not None and section != "" and entry.section.startswith(f"{section}.")
    return entry if is_inside else KEYS.get(key)


def unknown_key(key: str) -> ConfigError:
    """The error for a key that is neither a field nor a section.

    >>> unknown_key("model.moe_router_topk").fix
    'did you mean model.moe.router_topk?'
    """
    name, lower = key.rpartition(".")[2], key.lower()
    if lower != key and lower in (*KEYS, *SECTIONS):
        return ConfigError(f"unknown key {key}", fix=f"did you mean {lower}?")
    if name in ENTRIES:
        is_short = key == name or ENTRIES[name].key.startswith(key.removesuffix(name))
        why = "a key names its section" if is_short else ""
        return ConfigError(f"unknown key {key}", why=why, fix=f"did you mean {ENTRIES[name].key}?")
    known = KEYS if "." in key else SECTIONS
    if cure := cure_of(key, known):
        entry = next((entry for entry in ENTRIES.values() if entry.flag == cure), None)
        fix = advise(entry.key if entry else cure)
        return ConfigError(f"unknown key {key}", fix=fix)
    return ConfigError(
        f"unknown {'key' if known is KEYS else 'section'} {key}", fix=did_you_mean(key, known)
    )


def value_of(config: Any, key: str) -> Any:
    """The value of a field of a configuration (or section); of an absent section the default."""
    for name in key.split("."):
        config = _inner(config, name)
    return config


def _inner(config: Any, name: str) -> Any:
    """A field of a section; in place of an absent section its defaults."""
    value = getattr(config, name)
    kind = (
        type(config).__dataclass_fields__[name].metadata.get("section") if value is None else None
    )
    return value if kind is None else kind()


def flat_values(config: Any, *, path: str = "") -> dict[str, Any]:
    """The values of a configuration (or section) by key; of absent sections the defaults."""
    values: dict[str, Any] = {}
    for field in _fields(config.__class__):
        value, section = getattr(config, field.name), field.metadata.get("section")
        if section is None:
            values[f"{path}{field.name}"] = value
        else:
            values |= flat_values(
                section() if value is None else value, path=f"{path}{field.name}."
            )
    return values


@cache
def _fields(kind: Any) -> tuple[Field[Any], ...]:
    """The fields of a section, which dataclasses would collect at every call."""
    return fields(kind)


def with_values(config: Any, values: Mapping[str, Any]) -> Any:
    """The configuration (or section) with some fields changed.

    >>> with_values(Config(), {"model.moe.router_topk": 8}).model.moe.router_topk
    8
    """
    changed = {key.partition(".")[0] for key in values}
    kept: dict[str, Any] = {}  # sections in which nothing changes are not taken apart
    for field in _fields(config.__class__):
        value, is_split = (
            _inner(config, field.name),
            "section" in field.metadata and field.name in changed,
        )
        kept |= flat_values(value, path=f"{field.name}.") if is_split else {field.name: value}
    return build_section(type(config), kept | dict(values))


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by key as nested values.

    >>> nest({"model.moe.router_topk": 8})
    {'model': {'moe': {'router_topk': 8}}}
    """
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *path, name = key.split(".")
        section = nested
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value
    return nested


def unnest(values: Any) -> dict[str, Any]:
    """Nested values by key, the inverse of `nest`; {} for what is no mapping."""
    flat: dict[str, Any] = {}
    for name, value in values.items() if isinstance(values, Mapping) else ():
        is_nested = isinstance(value, Mapping)
        flat |= (
            {f"{name}.{key}": item for key, item in unnest(value).items()}
            if is_nested
            else {name: value}
        )
    return flat


def with_current_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a saved configuration with every field at its present key; unknown names stay.

    >>> with_current_keys({"model": {"num_layers": 2, "num_experts": 4}})
    {'model': {'num_layers': 2, 'moe': {'num_experts': 4}}}
    """

    def walk(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
        for name, value in values.items():
            entry = entry_of(f"{path}{name}")
            if entry is None and isinstance(value, Mapping) and value:
                yield from walk(value, f"{path}{name}.")
            else:
                yield entry.key if entry else f"{path}{name}", value

    return nest(dict(walk(values)))


def check_choice(
    name: str, value: str, *, known: Iterable[str], why: str = "the known names are"
) -> None:
    """Check that the value of a field, given by its unique name, is in a table of known names.

    Raises:
        ConfigError: an unknown name.
    """
    if value not in known:
        prefix, known = f"{ENTRIES[name].flag} ", list(known)
        meant = other_value(name, value)
        near = nearest_choice(value, known)
        if meant in known:
            fix = f"write {prefix}{meant}"
        else:
            fix = (
                f"did you mean {prefix}{near}?"
                if near
                else f"write {prefix}NAME with one of these names"
            )
        raise ConfigError(
            f"{ENTRIES[name].key} is {value!r}", why=f"{why} {', '.join(known)}", fix=fix
        )


def convert(entry: Entry, value: Any) -> Any:
    """The value of a field from a plain value or its text, checked on its own."""
    if entry.secret and isinstance(value, str) and value.startswith(MARK):
        return None  # in a checkpoint, which does not hold it
    if value is None or (
        isinstance(value, str) and value.lower() in ("null", "none") and entry.is_optional
    ):
        if not entry.is_optional:
            raise wrong_type(entry, "null")
        return None
    if entry.kind is list:
        items = value if isinstance(value, list | tuple) else convert_str(entry, value).split()
        return [convert_item(entry, item) for item in items]
    return convert_item(entry, value)


def convert_item(entry: Entry, value: Any) -> Any:
    """One value of a field, or one item of its list."""
    result: Any = (
        convert_choice(entry, value) if entry.choices else CONVERSIONS[entry.item](entry, value)
    )
    if entry.is_path:
        result = expanded(
            result, may_be_address=entry.takes_address or entry.name.endswith("data_path")
        )
        if entry.takes_address and is_address(result):
            parse(result)  # raises where it is none
    if result == "" and entry.default != "":
        raise ConfigError(f"{entry.key} is empty", why="it takes text", fix=entry.advice)
    check = entry.field.metadata["check"]
    if check is not None and not check(result):
        raise ConfigError(f"{entry.key} is {result}", why=f"it {check.__doc__}", fix=entry.advice)
    if entry.secret and not isinstance(result, FromEnvironment):
        return FromEnvironment(str(result), reference=f"${{oc.env:{entry.secret},null}}")
    return result


def convert_bool(entry: Entry, value: Any) -> bool:
    """true or false, yes or no, on or off, 1 or 0."""
    text = str(value).lower()
    if text not in BOOLEANS:
        raise wrong_type(entry, value)
    return BOOLEANS[text]


def convert_int(entry: Entry, value: Any) -> int:
    """Whole numbers, also written 1_000 or 1e4."""
    number = convert_float(entry, value)
    if number != int(number):
        raise wrong_type(entry, value)
    if abs(number) > LARGEST:
        raise ConfigError(
            f"{entry.key} is too large", why=f"numbers are at most {LARGEST:,}", fix=entry.advice
        )
    return (
        int(value) if isinstance(value, int) or str(value).lstrip("+-").isdigit() else int(number)
    )


def convert_float(entry: Entry, value: Any) -> float:
    """A finite number."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise wrong_type(entry, value)
    return number


def convert_str(entry: Entry, value: Any) -> str:
    """Text; a number in YAML becomes its text."""
    if isinstance(value, Mapping | list | tuple):
        raise wrong_type(entry, value)
    return value if isinstance(value, str) else str(value)


def convert_choice(entry: Entry, value: Any) -> str:
    """One of a few names."""
    check_choice(entry.name, str(value), known=entry.choices, why="it takes one of")
    return str(value)


BOOLEANS = {
    "true": True,
    "false": False,
    "yes": True,
    "no": False,
    "on": True,
    "off": False,
    "1": True,
    "0": False,
}
CONVERSIONS = {bool: convert_bool, int: convert_int, float: convert_float, str: convert_str}
MAX_SHOWN = 100  # characters of a wrong value in its error
TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration or section as plain nested values, the inverse of `config_from_dict`."""
    return nest({key: as_written(value) for key, value in flat_values(config).items()})


def typed(value: Any) -> str:
    """A value as it is typed on a command line, or "unset" or "empty".

    >>> typed(True), typed([1, 2]), typed(None), typed([])
    ('true', '1 2', 'unset', 'empty')
    """
    value = as_written(value)
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    return (" ".join(map(str, value)) if isinstance(value, list) else str(value)) or "empty"


def argument_of(name: str, value: Any) -> str:
    """The arguments that set a field, given by its unique name.

    >>> argument_of("add_bias_linear", False), argument_of("data_path", ["a", "b"])
    ('--no-add-bias-linear', '--data-path a b')
    """
    flag = ENTRIES[name].flag
    if isinstance(value, bool):
        return flag if value else f"--no-{flag[2:]}"
    return f"{flag} {'null' if value is None else typed(value)}"


def entries_of(section: str) -> list[Entry]:
    """The fields of one section, in order."""
    return [entry for entry in ENTRIES.values() if entry.section == section]


def wrong_type(entry: Entry, value: Any) -> ConfigError:
    """The error for a value the field cannot take."""
    expected = TYPE_NAMES.get(entry.item) or f"one of {', '.join(entry.choices)}"
    shown = value if len(repr(value)) <= MAX_SHOWN else f"{value!s:.{MAX_SHOWN}}..."
    return ConfigError(f"{entry.key} is {shown!r}", why=f"it takes {expected}", fix=entry.advice)
