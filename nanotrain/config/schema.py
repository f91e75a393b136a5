"""The fields of the configuration as a table, and conversion between plain values and a `Config`.

ENTRIES            every field by its unique name, "moe_router_topk"
KEYS               every field by its key, "model.moe.router_topk"
config_from_dict   plain values (YAML, JSON, text of a flag) -> Config
read_config        plain values by key -> Config
to_dict            Config -> plain values
with_values        a Config with some fields changed
convert            the value of one field
check_choice       refuse a name that a table does not hold
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import Field, fields, replace
from functools import cache
from typing import Any

from nanotrain.config.addresses import check_path
from nanotrain.config.config import Config
from nanotrain.config.option import Entry
from nanotrain.config.references import MARK, FromEnvironment, as_written
from nanotrain.config.suggest import (
    advise,
    advise_value,
    cure_of,
    did_you_mean,
)
from nanotrain.errors import ConfigError, ErrorCollector
from nanotrain.paths import require_utf8
from nanotrain.quantities import suffixed_number
from nanotrain.untrusted import LARGEST


def walk_sections(
    kind: Any = Config, *, path: str = "", prefix: str = ""
) -> Iterator[tuple[str, Field[Any], str]]:
    """Dotted name, field and flag prefix of every section below `kind`, after its parent."""
    for field in fields(kind):
        section = field.metadata.get("section")
        if section is not None:
            name = f"{path}{field.name}"
            section_prefix = prefix + field.metadata["prefix"]
            yield name, field, section_prefix
            yield from walk_sections(section, path=f"{name}.", prefix=section_prefix)


def walk_entries() -> Iterator[Entry]:
    """Every field, in order."""
    for name, parent, prefix in walk_sections():
        section = parent.metadata["section"]
        for field in fields(section):
            if "section" not in field.metadata:
                yield Entry(name, section, field=field, prefix=prefix)


SECTIONS: dict[str, Any] = {name: field.metadata["section"] for name, field, _ in walk_sections()}
ENTRIES: dict[str, Entry] = {entry.name: entry for entry in walk_entries()}
KEYS: dict[str, Entry] = {entry.key: entry for entry in ENTRIES.values()}
# fields of earlier versions that changed no value: ignored where a stored configuration has them
REMOVED = frozenset({"parallel.projection_fusion"})


def config_from_dict(values: Mapping[str, Any]) -> Config:
    """Convert `{section: {field: value}}` into a `Config`; other fields keep their defaults.

    The values may be those of a stored file: texts are taken as they are, `$NAME` and `~` too.

    Raises:
        ConfigError: unknown sections or fields, values of the wrong type or out of bounds; all of
            them in one error.

    >>> config_from_dict({"optim": {"lr": "2e-4"}}).optim.lr
    0.0002
    """
    errors = ErrorCollector()
    config, _ = read_config(dict(flatten(values, errors=errors)), errors=errors)
    errors.raise_errors()
    return config


def read_config(
    values: Mapping[str, Any],
    *,
    errors: ErrorCollector,
    files: Mapping[str, str] | None = None,
    expand: Callable[[Any], Any] | None = None,
) -> tuple[Config, frozenset[str]]:
    """Convert values by key into a `Config`; mistakes are collected in `errors`.

    Args:
        values: plain values by key.
        errors: collects values that cannot be converted.
        files: the file of a key, which its error names.
        expand: replaces `~` and variables of a path; None for paths that are taken as they are.

    Returns:
        The configuration, and the keys whose value cannot be read; they keep their defaults.
    """
    files = files or {}
    converted: dict[str, Any] = {}
    for key, value in values.items():
        with errors:
            try:
                if expand is not None and KEYS[key].is_path:
                    value = expand(value)
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
    switch_name = field.metadata.get("switch")
    if not switch_name:
        return False
    holder = section if hasattr(section, switch_name) else section_or_default(section, field.name)
    switch = getattr(holder, switch_name)
    value = field.metadata["value"]  # value of the switch with which the section is present
    if value:
        return bool(switch != value)
    return not switch


def flatten(
    values: Mapping[str, Any], *, errors: ErrorCollector, path: str = ""
) -> Iterator[tuple[str, Any]]:
    """Key and value of every field in nested mappings; unknown names are collected in `errors`."""
    for name, value in values.items():
        key = f"{path}{name}"
        entry = entry_of(key)
        if entry is not None:
            yield entry.key, value
        elif key not in SECTIONS:
            if key not in REMOVED:
                errors.errors.append(unknown_key(key))
        elif isinstance(value, Mapping | None):
            yield from flatten(value or {}, errors=errors, path=f"{key}.")
        else:
            error = ConfigError(
                f"section {key} is {value!r}",
                why="a section holds fields",
                fix=f"write {key}.FIELD",
            )
            errors.errors.append(error)


def entry_of(key: str) -> Entry | None:
    """The field of a key; a nested section may be left out, as in files written before it existed.

    >>> entry_of("model.moe_router_topk").key, entry_of("optim.fp8_format")
    ('model.moe.router_topk', None)
    """
    section, _, name = key.rpartition(".")
    entry = ENTRIES.get(name)
    if entry is not None and section != "" and entry.section.startswith(f"{section}."):
        return entry
    return KEYS.get(key)


def unknown_key(key: str) -> ConfigError:
    """The error for a key that is neither a field nor a section.

    >>> unknown_key("model.moe_router_topk").fix
    'did you mean model.moe.router_topk?'
    """
    lower = key.lower()
    if lower != key and lower in (*KEYS, *SECTIONS):
        return ConfigError(f"unknown key {key}", fix=f"did you mean {lower}?")
    name = key.rpartition(".")[2]
    if name in ENTRIES:
        right_key = ENTRIES[name].key
        is_short = key == name or right_key.startswith(key.removesuffix(name))
        why = "a key names its section" if is_short else ""
        return ConfigError(f"unknown key {key}", why=why, fix=f"did you mean {right_key}?")
    is_section = "." not in key
    known = SECTIONS if is_section else KEYS
    cure = cure_of(key, known)
    if cure:
        return ConfigError(f"unknown key {key}", fix=advise(as_key(cure)))
    what = f"unknown {'section' if is_section else 'key'} {key}"
    return ConfigError(what, fix=did_you_mean(key, known))


def as_key(cure: str) -> str:
    """A cure for YAML: the key of a field in place of a flag; other cures unchanged."""
    for entry in ENTRIES.values():
        if entry.flag == cure:
            return entry.key
    return cure


def value_of(config: Any, key: str) -> Any:
    """The value of a field of a configuration (or section); of an absent section the default."""
    for name in key.split("."):
        config = section_or_default(config, name)
    return config


def section_or_default(config: Any, name: str) -> Any:
    """A field of a section; in place of an absent section its defaults."""
    value = getattr(config, name)
    if value is not None:
        return value
    section = type(config).__dataclass_fields__[name].metadata.get("section")
    return None if section is None else section()


def flat_values(config: Any, *, path: str = "") -> dict[str, Any]:
    """The values of a configuration (or section) by key; of absent sections the defaults."""
    values: dict[str, Any] = {}
    for field in _fields(config.__class__):
        key = f"{path}{field.name}"
        if "section" in field.metadata:
            values |= flat_values(section_or_default(config, field.name), path=f"{key}.")
        else:
            values[key] = getattr(config, field.name)
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
    kept: dict[str, Any] = {}  # sections without changes are kept as they are
    for field in _fields(config.__class__):
        value = section_or_default(config, field.name)
        if "section" in field.metadata and field.name in changed:
            kept |= flat_values(value, path=f"{field.name}.")
        else:
            kept[field.name] = value
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
    """Nested values by key, the inverse of `nest`; {} for a value that is no mapping."""
    flat: dict[str, Any] = {}
    if not isinstance(values, Mapping):
        return flat
    for name, value in values.items():
        if not isinstance(value, Mapping):
            flat[name] = value
            continue
        for key, item in unnest(value).items():
            flat[f"{name}.{key}"] = item
    return flat


def with_current_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a saved configuration with every field at its present key; unknown names stay.

    >>> with_current_keys({"model": {"num_layers": 2, "num_experts": 4}})
    {'model': {'num_layers': 2, 'moe': {'num_experts': 4}}}
    """

    def walk(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
        """Keys and values, in nested mappings too."""
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
    if value in known:
        return
    entry = ENTRIES[name]
    names = list(known)
    fix = advise_value(name, value, flag=entry.flag, names=names)
    raise ConfigError(f"{entry.key} is {value!r}", why=f"{why} {', '.join(names)}", fix=fix)


def convert(entry: Entry, value: Any) -> Any:
    """The value of a field from a plain value or its text, checked on its own."""
    if entry.secret and isinstance(value, str) and value.startswith(MARK):
        return None  # in a checkpoint, which does not hold it
    if entry.is_optional and is_null(value):
        return None
    if value is None:
        raise wrong_type(entry, "null")
    if entry.kind is list:
        items = value if isinstance(value, list | tuple) else convert_str(entry, value).split()
        return [convert_item(entry, item) for item in items]
    return convert_item(entry, value)


def is_null(value: Any) -> bool:
    """Whether a value is none, or a text that stands for none."""
    return value is None or (isinstance(value, str) and value.lower() in ("null", "none"))


def convert_item(entry: Entry, value: Any) -> Any:
    """One value of a field, or one item of its list."""
    convert_value = convert_choice if entry.choices else CONVERSIONS[entry.item]
    result: Any = convert_value(entry, value)
    if entry.is_path:
        check_path(entry, result)
    check_value(entry, result)
    if entry.secret and not isinstance(result, FromEnvironment):
        return FromEnvironment(str(result), reference=f"${{oc.env:{entry.secret},null}}")
    return result


def check_value(entry: Entry, value: Any) -> None:
    """Check the bound of a field, and that text is not empty.

    Raises:
        ConfigError: the value is out of bounds.
    """
    if value == "" and entry.default != "":
        raise ConfigError(f"{entry.key} is empty", why="it takes text", fix=entry.advice)
    check = entry.field.metadata["check"]
    if check is not None and not check(value):
        raise ConfigError(f"{entry.key} is {value}", why=f"it {check.__doc__}", fix=entry.advice)


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
    is_whole = isinstance(value, int) or str(value).lstrip("+-").isdigit()
    return int(value) if is_whole else int(number)  # a large number is not rounded


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
    return require_utf8(value, entry.key) if isinstance(value, str) else str(value)


def convert_choice(entry: Entry, value: Any) -> str:
    """The text of a value, which has to be a choice of the field."""
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
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text or "empty"


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
    fix = entry.advice
    is_number = entry.item in (int, float)
    number = suffixed_number(str(value)) if is_number else None
    if number is not None:
        fix = f"write {entry.flag} {number}"
    elif is_number and "," in str(value):
        fix = f"nanotrain sweep --over {entry.name}={value} trains each of them"
    return ConfigError(f"{entry.key} is {shown!r}", why=f"it takes {expected}", fix=fix)
