"""Arguments in Hydra's forms: `key=value`, `++key=value`, `~key`, a search path, a chosen file.

docs/decisions/0021-the-command-line.md says which part of the command line is Hydra's.
"""

import re

from nanotrain.config.arguments import choice_of
from nanotrain.config.command_line import CommandLine, Setting
from nanotrain.config.megatron import megatron
from nanotrain.config.option import flag_of
from nanotrain.config.schema import ENTRIES, KEYS, SECTIONS, unknown_key
from nanotrain.errors import ConfigError

OVERRIDE = re.compile(r"^(?P<prefix>[+~]*)(?P<key>[A-Za-z_][\w.@/]*)=(?P<value>.*)$", re.DOTALL)
DELETION = re.compile(r"^~(?P<key>[A-Za-z_]\w*(\.\w+)+)$")


def is_override(argument: str) -> bool:
    """Whether an argument sets or deletes a field, or chooses a recipe.

    >>> is_override("++optim.lr=3"), is_override("~optim.lr"), is_override("~/data")
    (True, True, False)
    """
    name, has_value, _ = argument.partition("=")
    if not has_value:
        return name.startswith("~") and name[1:] in KEYS
    return name == "+config" or name.lstrip("+~") in KEYS


def begins_argument(text: str) -> bool:
    """Whether a text is a flag, an override or a choice and not a value, as a negative number."""
    if re.match(r"--|-(?!inf|nan)[A-Za-z]", text):
        return True
    match = OVERRIDE.match(text)
    if match is None:
        return is_override(text)
    if match["prefix"]:
        return True
    section, dot, name = match["key"].partition(".")
    if "/" in section:
        return False
    if dot:
        return all(part.isidentifier() for part in name.split("."))
    return section in {"config", *SECTIONS, *ENTRIES}


def read_override(line: CommandLine, argument: str) -> None:
    """Read one of Hydra's forms: a value, a deletion, a search path or the choice of a file."""
    match = OVERRIDE.match(argument)
    if match is None:
        line.settings.append(read_deletion(argument, key=argument[1:]))
        return
    prefix = match["prefix"]
    key = match["key"]
    value = match["value"]
    if key == "hydra.searchpath":
        line.search_path += read_search_path(value)
    elif key.startswith("hydra."):
        raise ConfigError(
            f"{argument} has no effect",
            why="of Hydra's own settings only hydra.searchpath is used here",
        )
    elif "." not in key and key not in ENTRIES:
        if prefix not in ("", "+"):
            raise ConfigError(
                f"{argument} begins with {prefix}",
                why="a YAML file is chosen, not removed or added",
                fix=f"write {choice_of(key)}=NAME",
            )
        choose_file(line, key, value=value)
    elif prefix == "~":
        line.settings.append(read_deletion(argument, key=key, value=value))
    else:
        line.settings.append(read_value(argument, prefix=prefix, key=key, value=value))


def choose_file(line: CommandLine, key: str, *, value: str) -> None:
    """Choose a YAML file of a group, or the recipe; the last one counts, as of a flag."""
    before = line.choices.get(key, value)
    if before != value:
        line.overruled.append(
            f"{choice_of(key)}={value} replaces {choice_of(key)}={before}: one file of a group is "
            "read, which may name another in its defaults"
        )
    line.choices[key] = value


def read_search_path(value: str) -> list[str]:
    """The folders of `hydra.searchpath=[DIR,...]`."""
    parts = [part.strip() for part in value.strip("[]").split(",")]
    return [part.strip("'\"") for part in parts if part]


def read_value(argument: str, *, prefix: str, key: str, value: str) -> Setting:
    """The setting of `key=value` or `++key=value`, which are the same: all keys exist.

    Raises:
        ConfigError: no field has the key, or another prefix, as `+` for a key that does not exist.
    """
    require_key(key)
    if prefix not in ("", "++"):
        raise ConfigError(
            f"{argument} begins with {prefix}",
            why="every field exists already",
            fix=f"write {key}={value}",
        )
    return Setting(key, value, argument, is_hydra=True)


def read_deletion(argument: str, *, key: str, value: str = "") -> Setting:
    """The setting of `~key`, or of `~key=value`, which requires that value.

    Raises:
        ConfigError: no field has the key.
    """
    require_key(key)
    return Setting(key, value, argument, is_deletion=True)


def require_key(key: str) -> None:
    """Check that a field has a key.

    Raises:
        ConfigError: none has it; the key may be named as a flag of Megatron-LM.
    """
    if key in KEYS:
        return
    flag = flag_of(key.rpartition(".")[2])
    row = megatron().flags.get(flag)
    if row is not None and row.kind == "rename":
        raise ConfigError(f"unknown key {key}", fix=f"write {flag}")
    raise unknown_key(key)
