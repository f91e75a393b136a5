"""Parse the arguments of a command, which commands.yaml declares, and find a command by its name."""

import argparse
import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from textwrap import TextWrapper
from typing import Any, NoReturn

from nanotrain.cli.places import read_name, read_path, written_path
from nanotrain.config.flags import known_flags, split_settings
from nanotrain.config.megatron import row_of
from nanotrain.config.suggest import by_spelling, did_you_mean
from nanotrain.config.tables import read_table
from nanotrain.errors import ConfigError
from nanotrain.paths import expanded, local_path

Command = Callable[[Sequence[str]], int]


@cache
def declared(command: str) -> Mapping[str, Any]:
    """What commands.yaml declares of a command."""
    row: Mapping[str, Any] = read_table("commands", folder=Path(__file__).parent).get(command, {})
    return row


class CommandParser(argparse.ArgumentParser):
    """A parser without abbreviations that raises ConfigError; the function's docstring is the
    description.

    Args:
        command: name of the command, a key of commands.yaml.
        function: function that the command runs.
    """

    def __init__(self, command: str, function: Callable[..., int]) -> None:
        row = declared(command)
        super().__init__(
            prog=f"nanotrain {command}",
            description=function.__doc__,
            epilog=row.get("epilog"),
            allow_abbrev=False,
        )
        self.register("action", "switch", argparse.BooleanOptionalAction)
        for name, convert in TYPES.items():
            self.register("type", name, convert)
        self._elsewhere: Mapping[str, str] = row.get("elsewhere", {})
        if alternatives := row.get("one_of"):
            group = self.add_mutually_exclusive_group(required=True)
            for name, options in alternatives.items():
                group.add_argument(name, **options)
        for name, options in row.get("arguments", {}).items():
            self.add_argument(name, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; misspelled flags, and those of other programs, are one error with what to write,
        before any other.

        Settings of a training are set aside first: argparse would take their values for the
        command's own arguments.
        """
        flags = [str(argument).partition("=")[0] for argument in args or ()]
        meant = {flag: cure for flag in flags if (cure := self._meant(flag))}
        if meant:
            self.error(
                "unknown " + ", ".join(f"{flag} (write {cure})" for flag, cure in meant.items())
            )
        one_value = [
            flag for flag, action in self._option_string_actions.items() if action.nargs is None
        ]
        settings, others = split_settings(
            args or (), own=self._option_string_actions, with_value=one_value
        )
        parsed, rest = super().parse_known_args(others, namespace)
        return parsed, [*settings, *rest]

    def _meant(self, flag: str) -> str | None:
        """What to write for a flag of another program, or for a misspelled one that no training has
        either.
        """
        own = self._option_string_actions
        if flag in self._elsewhere:
            return self._elsewhere[flag]
        if not flag.startswith("--") or flag in own or flag in known_flags() or row_of(flag):
            return None
        near = by_spelling(flag, [*own, *self._elsewhere])
        return self._elsewhere.get(near, near) if near else None

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        raise ConfigError(f"{self.prog}: {message}", fix=f"{self.prog} --help lists the arguments")


def number(what: str, *, low: float, high: float) -> Callable[[str], float]:
    """The converter of a number from `low` to `high`, of their type; `what` names it in errors."""

    def convert(text: str) -> float:
        with suppress(ValueError):
            if low <= (value := type(low)(text)) <= high:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}")

    return convert


def whole_numbers(text: str) -> tuple[int, ...]:
    """Whole numbers of at least 0, separated by commas."""
    if not re.fullmatch("[0-9]{1,9}(,[0-9]{1,9})*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 0,1,8")
    return tuple(map(int, text.split(",")))


def png_file(text: str) -> Path:
    """A file for a picture; the ending keeps other files from being replaced."""
    if not text.lower().endswith(".png"):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .png")
    return local_path(text)


# The converters of commands.yaml.
TYPES: dict[str, Callable[[str], Any]] = {
    "path": local_path,
    "read_path": read_path,
    "written_path": written_path,
    "text_path": expanded,
    "tokenizer": read_name,
    "corpus": partial(expanded, may_be_address=True),
    "png_file": png_file,
    "words": shlex.split,
    "whole_numbers": whole_numbers,
    **{name: number(**row) for name, row in declared(".numbers").items()},
    **{name: partial(local_path, why=why) for name, why in declared(".local").items()},
}


def run_command(program: str, argv: Sequence[str], *, commands: dict[str, Command]) -> int:
    """Run the command named first; list the commands for --help and without a command.

    Raises:
        ConfigError: an unknown command.
    """
    if argv and argv[0] in commands:
        return commands[argv[0]](argv[1:])
    if not argv or argv[0] in ("-h", "--help"):
        print(usage(program, commands, width=shutil.get_terminal_size().columns))
        return 0
    fix = did_you_mean(
        argv[0],
        [*commands, "--help", "--version"],
        prefix=f"{program} ",
        listed_by=f"{program} --help",
    )
    raise ConfigError(
        f"unknown command {argv[0]!r}", why=f"{program} takes {', '.join(commands)}", fix=fix
    )


def usage(program: str, commands: dict[str, Command], *, width: int) -> str:
    """The commands and what they do, in lines of `width` columns that break between words."""
    wrapped = TextWrapper(min(max(width, 60), 120), subsequent_indent=" " * 14)
    summaries = {
        name: " ".join((command.__doc__ or "").partition("\n\n")[0].split())
        for name, command in commands.items()
    }
    rows = [wrapped.fill(f"  {name:<10}  {summary}") for name, summary in summaries.items()]
    wrapped.subsequent_indent = ""
    rest = wrapped.fill(
        f"{program} COMMAND --help lists its arguments, nanotrain --version prints the version"
    )
    return "\n".join([f"usage: {program} COMMAND ...", "", *rows, "", rest])
