"""The arguments that exist, as tables, and the errors for arguments that do not.

FLAGS, NEGATIONS, ALIASES, SWITCHES     flags of fields, flags for one value, and other flags
unknown_flag, unexpected, ...           errors that name what was probably meant, and what to write
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from nanotrain.config.megatron import row_of
from nanotrain.config.option import Entry, flag_of
from nanotrain.config.schema import ENTRIES, KEYS
from nanotrain.config.suggest import (
    LISTED_BY,
    advise,
    by_meaning,
    cure_of,
    nearest,
    with_shared_words,
)
from nanotrain.config.tables import read_table
from nanotrain.errors import ConfigError


@dataclass(frozen=True)
class Alias:
    """A flag for one value of a field.

    Another argument may set the field to a value of `agrees` only.
    """

    name: str
    value: str
    agrees: tuple[str, ...]
    wins: bool = False  # its value replaces another argument's, as in Megatron-LM


TABLE = read_table("arguments")
ALIASES = {
    flag: Alias(
        row["name"],
        row["value"],
        agrees=tuple(row.get("agrees", [row["value"]])),
        wins=row.get("wins", False),
    )
    for flag, row in TABLE["aliases"].items()
}
VALUES: dict[str, dict[str, str]] = TABLE["spellings"]  # other spellings of a value, by unique name
# arguments that set no field by themselves, as they are written
ARGUMENTS: dict[str, str] = TABLE["arguments"]
FLAGS: dict[str, Entry] = {entry.flag: entry for entry in ENTRIES.values()}
NEGATIONS: dict[str, Entry] = {
    f"--no-{flag[2:]}": entry for flag, entry in FLAGS.items() if entry.kind is bool
}
# Flags without a value that set no field, and the attribute of CommandLine that becomes true.
SWITCHES = {"--explain": "wants_explanation", "--megatron-defaults": "wants_megatron_defaults"}

# typographic hyphens, dashes and minus
NO_HYPHENS = tuple("\u2010\u2011\u2012\u2013\u2014\u2015\u2212")


def choice_of(group: str) -> str:
    """The argument before `=NAME` that chooses a YAML file of a group: `+config`, `model`."""
    return "+config" if group == "config" else group


def is_file(name: str) -> bool:
    """Whether the NAME of `+config=NAME` is a file and not one of the recipes."""
    return name.endswith((".yaml", ".yml"))


def unknown_flag(flag: str, *, known: Collection[str], listed_by: str = LISTED_BY) -> ConfigError:
    """The error for a flag that does not exist.

    It says what the flag is called here, else the nearest spelling, else where to look.

    >>> unknown_flag("--learning-rate", known=["--lr"]).fix
    'did you mean --lr?'
    """
    cure = cure_of_flag(flag, known)
    fix = advise(cure) if cure else f"{listed_by} lists the flags"
    near = [] if cure else with_shared_words(flag, filter(is_accepted, known))
    if near:
        fix = f"flags of that kind are {', '.join(near)}; {fix}"
    return ConfigError(f"unknown flag {flag}", fix=fix)


def cure_of_flag(flag: str, known: Collection[str]) -> str | None:
    """The cure for a flag that does not exist."""
    # a key, a flag with a section, or another number of dashes
    field = flag_of(flag.rpartition(".")[2].strip("-"))
    if field in known and not by_meaning(flag):
        return field
    return cure_of(flag, known) or nearest(flag, filter(is_accepted, known))


def is_accepted(flag: str) -> bool:
    """Whether a flag is no refused one of Megatron-LM."""
    row = row_of(flag)
    return row is None or row.kind != "not yet"


def no_value(flag: str) -> ConfigError:
    """The error for a flag at the end, or in front of another flag."""
    fix = ""
    if flag in FLAGS:
        fix = FLAGS[flag].advice
    else:
        for text in ARGUMENTS:
            if text.split()[0] == flag:
                fix = f"write {text}"
    return ConfigError(f"{flag} has no value", why="it takes one", fix=fix)


def takes_no_value(flag: str, value: str) -> ConfigError:
    """The error for `--flag=value` of a flag without values."""
    fix = f"write {flag} alone or leave it out"
    return ConfigError(f"{flag}={value} gives {flag} a value", why="it takes none", fix=fix)


def holds_several(argument: str) -> bool:
    """Whether quotes join an argument with the next flag or setting.

    >>> holds_several("--lr=1 --bf16"), holds_several("--generate-prompt=a --b")
    (True, False)
    """
    name, _, value = argument.partition("=")
    entry = FLAGS.get(name) or KEYS.get(name.lstrip("+~"))
    if entry is not None and entry.item is str:
        return False
    return re.search(r"\s(--[A-Za-z]|\+?[A-Za-z_.]+=)", value) is not None


def quoted(argument: str) -> ConfigError:
    """The error for several words in one argument."""
    return ConfigError(
        f"one argument holds several: {argument!r}",
        why="the shell passes what stands between quotes as one argument",
        fix="leave out the quotes around it",
    )


def no_hyphen(argument: str) -> ConfigError:
    """The error for a flag that was copied from a text with typographic dashes."""
    name = argument.lstrip("".join(NO_HYPHENS) + "-")
    return ConfigError(
        f"unexpected argument {argument!r}",
        why="it begins with a typographic dash in place of hyphens, as some programs write it",
        fix=f"write --{name}",
    )


def spaced(key: str, *, rest: Sequence[str]) -> ConfigError:
    """The error for `key = value` and `key value`, which a shell passes in parts."""
    value = "".join(rest).removeprefix("=")
    if not value:
        value = "NAME" if key == "+config" else "VALUE"
    return ConfigError(
        f"unexpected argument {' '.join([key, *rest])!r}",
        why="a key, = and its value are one argument",
        fix=f"write {key}={value}",
    )


def unexpected(argument: str, *, previous: str, listed_by: str = LISTED_BY) -> ConfigError:
    """The error for an argument that is neither a flag, its value nor an override.

    Args:
        argument: the argument.
        previous: the argument before it.
        listed_by: the command that lists the arguments.
    """
    what = f"unexpected argument {argument!r}"
    error = one_value_too_many(what, argument, previous=previous)
    if error is not None:
        return error
    why = "it is neither a flag nor key=value"
    flag = f"--{argument}"
    if flag in FLAGS or flag in ALIASES or row_of(flag):
        return ConfigError(what, why=why, fix=f"write {flag}")
    for row in TABLE["unexpected"]:
        if re.fullmatch(row["pattern"], argument):
            return ConfigError(what, why=row["why"], fix=row["fix"])
    meant = by_meaning(argument)
    if meant:
        return ConfigError(what, why=why, fix=advise(meant))
    return ConfigError(what, why=why, fix=fix_of_unexpected(argument, listed_by=listed_by))


def one_value_too_many(what: str, argument: str, *, previous: str) -> ConfigError | None:
    """The error for a value behind a flag that takes no further one; None behind another flag."""
    entry = FLAGS.get(previous)
    if entry is not None and entry.kind is bool:
        return ConfigError(
            what, why=f"{previous} takes no value", fix=f"write {previous}={argument}"
        )
    if previous in ALIASES or previous in NEGATIONS or previous in SWITCHES or row_of(previous):
        return ConfigError(
            what, why=f"{previous} takes no more values", fix=f"leave {argument} out"
        )
    if entry is not None and entry.kind is not list and re.fullmatch(r"[\d.eE+-]+", argument):
        name = previous.removeprefix("--")
        return ConfigError(
            what,
            why=f"{previous} takes one value",
            fix=f"leave it out; nanotrain sweep --over {name}=V1,V2 tries several",
        )
    return None


def fix_of_unexpected(argument: str, *, listed_by: str) -> str:
    """The cure for an argument that nothing is known about."""
    needs_flag = f"write the flag that it belongs to before it; {listed_by} lists them"
    if listed_by != LISTED_BY:  # a command without recipes
        return needs_flag
    suffix = PurePath(argument).suffix
    if suffix == ".py":
        return "leave it out: the program is python -m nanotrain.train"
    if suffix in (".toml", ".json"):
        return "write its settings into a YAML file, and +config=FILE.yaml"
    if is_file(argument):
        return f"write +config={argument}"
    if argument.isidentifier():
        return f"write +config={argument} for the recipe of that name"
    return needs_flag
