"""The errors for words of a command line that are wrong by themselves: what was probably meant, and what to write."""

import re
from collections.abc import Collection, Sequence
from pathlib import PurePath

from nanotrain.config.arguments import ALIASES, ARGUMENTS, FLAGS, NEGATIONS, SWITCHES, is_file
from nanotrain.config.megatron import row_of
from nanotrain.config.option import flag_of
from nanotrain.config.suggest import LISTED_BY, advise, by_meaning, cure_of, nearest
from nanotrain.errors import ConfigError

NO_HYPHENS = (
    "\u2010",
    "\u2011",
    "\u2012",
    "\u2013",
    "\u2014",
    "\u2015",
    "\u2212",
)  # typographic hyphens, dashes and minus


def unknown_flag(flag: str, *, known: Collection[str], listed_by: str = LISTED_BY) -> ConfigError:
    """The error for a flag that does not exist: what it is called here, else the nearest spelling, else where to look.

    >>> unknown_flag("--learning-rate", known=["--lr"]).fix
    'did you mean --lr?'
    """
    field = flag_of(flag.rpartition(".")[2].strip("-"))
    if field in known and not by_meaning(flag):  # a key, a flag with a section, or another number of dashes
        cure: str | None = field
    else:
        cure = cure_of(flag, known) or nearest(flag, known)
    return ConfigError(f"unknown flag {flag}", fix=advise(cure) if cure else f"{listed_by} lists the flags")


def no_value(flag: str) -> ConfigError:
    """The error for a flag at the end, or in front of another flag."""
    written = next((text for text in ARGUMENTS if text.split()[0] == flag), "")
    fix = FLAGS[flag].meaning if flag in FLAGS else f"write {written}" if written else ""
    return ConfigError(f"{flag} has no value", why="it takes one", fix=fix)


def no_hyphen(argument: str) -> ConfigError:
    """The error for a flag that was copied from a text with typographic dashes."""
    why = "it begins with a typographic dash in place of hyphens, as some programs write it"
    fix = f"write --{argument.lstrip(''.join(NO_HYPHENS) + '-')}"
    return ConfigError(f"unexpected argument {argument!r}", why=why, fix=fix)


def spaced(key: str, *, rest: Sequence[str]) -> ConfigError:
    """The error for `key = value` and `key value`, which a shell passes in parts."""
    value = "".join(rest).removeprefix("=") or ("NAME" if key == "+config" else "VALUE")
    why = "a key, = and its value are one argument"
    return ConfigError(f"unexpected argument {' '.join([key, *rest])!r}", why=why, fix=f"write {key}={value}")


def unexpected(argument: str, *, previous: str, listed_by: str = LISTED_BY) -> ConfigError:
    """The error for an argument that is neither a flag, its value nor an override; `previous` stands before it."""
    flag, what = f"--{argument}", f"unexpected argument {argument!r}"
    if previous in FLAGS and FLAGS[previous].kind is bool:
        return ConfigError(what, why=f"{previous} takes no value", fix=f"write {previous}={argument}")
    if previous in ALIASES or previous in NEGATIONS or previous in SWITCHES or row_of(previous):
        return ConfigError(what, why=f"{previous} takes no more values", fix=f"leave {argument} out")
    if previous in FLAGS and FLAGS[previous].kind is not list and re.fullmatch(r"[\d.eE+-]+", argument):
        why, name = f"{previous} takes one value", previous.removeprefix("--")
        return ConfigError(what, why=why, fix=f"leave it out; nanotrain sweep --over {name}=V1,V2 tries several")
    why = "it is neither a flag nor key=value"
    if flag in FLAGS or flag in ALIASES or row_of(flag):
        return ConfigError(what, why=why, fix=f"write {flag}")
    if not argument:
        return ConfigError("an empty argument", why=why, fix="remove the quotes around a variable that is not set")
    if not argument.strip(" \\"):
        fix = "end the line with the backslash, or write the whole command on one line without it"
        return ConfigError(what, why="a backslash goes on to the next line only at the end of a line", fix=fix)
    if argument.startswith("$"):
        fix = "define the variable, and write it without single quotes"
        return ConfigError(what, why="the shell has not replaced the variable", fix=fix)
    meant, suffix = by_meaning(argument), PurePath(argument).suffix
    if meant:
        return ConfigError(what, why=why, fix=advise(meant))
    fix = f"write +config={argument}" + ("" if is_file(argument) else " for the recipe of that name")
    if listed_by != LISTED_BY:  # a command without recipes
        fix = f"write the flag that it belongs to before it; {listed_by} lists them"
    elif suffix == ".py":
        fix = "leave it out: the program is python -m nanotrain.train"
    elif suffix in (".toml", ".json"):
        fix = "write its settings into a YAML file, and +config=FILE.yaml"
    elif not (argument.isidentifier() or is_file(argument)):
        fix = f"write the flag that it belongs to before it; {listed_by} lists them"
    return ConfigError(what, why=why, fix=fix)
