"""The parser of a command's arguments, and the choice of a command by its name."""

import argparse
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from textwrap import TextWrapper
from typing import Any, NoReturn

from nanotrain.config.flags import known_flags, split_settings
from nanotrain.config.megatron import row_of
from nanotrain.config.suggest import by_spelling, nearest
from nanotrain.errors import ConfigError

Command = Callable[[Sequence[str]], int]
# last sentence of the help of a command that takes settings of a training
# what a command that starts no rank takes in place of a launcher's numbers of ranks
NUMBER_OF_GPUS = dict.fromkeys(
    (
        "--nnodes",
        "--nodes",
        "--num-nodes",
        "--nproc-per-node",
        "--gpus",
        "--num-gpus",
        "--ngpus",
        "--gpus-per-node",
    ),
    "--world-size N, the GPUs of all machines",
)
ANY_FLAG = "any configuration flag may follow, for example --tensor-model-parallel-size 2"


class CommandParser(argparse.ArgumentParser):
    """A parser without abbreviations that raises ConfigError.

    Args:
        command: name of the command.
        function: function that the command runs; its docstring is the description.
        epilog: last sentence of the help.
        other_flags: flags of other programs by name, each with the flag to write instead.
    """

    def __init__(
        self,
        command: str,
        function: Callable[..., int],
        *,
        epilog: str | None = None,
        other_flags: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            prog=f"nanotrain {command}",
            description=function.__doc__,
            epilog=epilog,
            allow_abbrev=False,
        )
        self._other_flags = other_flags or {}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; the settings of a training are left over.

        They are set aside first: argparse would take their values for the command's own arguments.

        Raises:
            ConfigError: misspelled flags and flags of other programs, all in one error, before any
                other mistake.
        """
        arguments = args or ()
        self._refuse_unknown_flags(arguments)
        options = self._option_string_actions
        one_value = [flag for flag, action in options.items() if action.nargs is None]
        settings, others = split_settings(arguments, own=options, with_value=one_value)
        parsed, rest = super().parse_known_args(others, namespace)
        return parsed, [*settings, *rest]

    def _refuse_unknown_flags(self, arguments: Sequence[str]) -> None:
        """Check that no flag is another program's, or a misspelled one of this command."""
        cures: dict[str, str] = {}
        for argument in arguments:
            flag = str(argument).partition("=")[0]
            cure = self._cure_of(flag)
            if cure:
                cures[flag] = cure
        if cures:
            texts = [f"{flag} (write {cure})" for flag, cure in cures.items()]
            self.error(f"unknown {', '.join(texts)}")

    def _cure_of(self, flag: str) -> str | None:
        """The cure for a flag of another program or a misspelled flag; None for all others.

        Flags of a training, misspelled or not, have None: the training checks them.
        """
        options = self._option_string_actions
        if flag in self._other_flags:
            return self._other_flags[flag]
        if not flag.startswith("--") or flag in options or flag in known_flags() or row_of(flag):
            return None
        near = by_spelling(flag, [*options, *self._other_flags])
        return self._other_flags.get(near, near) if near else None

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as a ConfigError in place of printing it."""
        raise ConfigError(f"{self.prog}: {message}", fix=f"{self.prog} --help lists the arguments")


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
    raise unknown_command(program, argv[0], commands=commands)


def unknown_command(program: str, name: str, *, commands: Collection[str]) -> ConfigError:
    """The error for a command that does not exist; all are listed if none was probably meant."""
    what = f"unknown command {name!r}"
    longer = [f"{program} {command}" for command in commands if command.startswith(f"{name}-")]
    if longer:
        return ConfigError(what, fix=f"write {' or '.join(longer)}")
    near = nearest(name, [*commands, "--help", "--version"])
    if near:
        return ConfigError(what, fix=f"did you mean {program} {near}?")
    return ConfigError(
        what, why=f"{program} takes {', '.join(commands)}", fix=f"{program} --help describes them"
    )


def usage(program: str, commands: dict[str, Command], *, width: int) -> str:
    """The commands and what they do, in lines of `width` columns that break between words."""
    wrapped = TextWrapper(min(max(width, 60), 120), subsequent_indent=" " * 14)
    rows = []
    for name, command in commands.items():
        summary = (command.__doc__ or "").partition("\n\n")[0]
        rows.append(wrapped.fill(f"  {name:<10}  {' '.join(summary.split())}"))
    wrapped.subsequent_indent = ""
    rest = wrapped.fill(
        f"{program} COMMAND --help lists its arguments, nanotrain --version prints the version"
    )
    return "\n".join([f"usage: {program} COMMAND ...", "", *rows, "", rest])
