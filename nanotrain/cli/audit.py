"""`nanotrain audit`: what a launch script of Megatron-LM asks for, and where that goes wrong."""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nanotrain.cli.addresses import read_path, show
from nanotrain.cli.parser import NUMBER_OF_GPUS, CommandParser
from nanotrain.cli.values import world_size
from nanotrain.errors import CheckpointError, ConfigError
from nanotrain.system import importing_torch

if TYPE_CHECKING:
    from nanotrain.audit.meaning import Meaning
    from nanotrain.audit.sources import Source

FLAGS_AFTER = "flags of Megatron-LM may follow: they come after those of the script"
NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*|[0-9]{1,2}")


def audit(argv: Sequence[str]) -> int:
    """Audit a launch script of Megatron-LM: model, layout, memory and time, flags that contradict
    each other or have no counterpart here, and bugs that a version has in its configuration.

    Scripts are read as text and never run.
    """
    args, rest = audit_parser().parse_known_args(argv)
    with importing_torch():
        from nanotrain.audit import report
    from nanotrain.audit.known_bugs import newest_version, read_version
    from nanotrain.planner.hardware import gpu_of

    version = newest_version()
    if args.megatron_version is not None:
        version = read_version(args.megatron_version)
    gpu = gpu_of(args.gpu)
    source, meaning = read_arguments_of(args, rest)
    result = report.audit(source, meaning, gpu=gpu, version=version, ranks=args.world_size)
    if args.json:
        show(json.dumps(report.audit_values(result), indent=2))
    else:
        show(report.audit_text(result))
    return 0


def audit_parser() -> CommandParser:
    """The parser of `nanotrain audit`."""
    parser = CommandParser("audit", audit, epilog=FLAGS_AFTER, other_flags=NUMBER_OF_GPUS)
    parser.add_argument(
        "script",
        type=read_path,
        nargs="?",
        help="launch script, file of arguments, YAML file with MODEL_ARGS, or folder of --save of "
        "Megatron-LM (default: the flags that follow)",
    )
    parser.add_argument(
        "--gpu",
        default="h100",
        metavar="NAME",
        help="GPU of every rank: a100-80gb, h100, b200, mi300x ... (default: %(default)s)",
    )
    parser.add_argument(
        "--world-size",
        type=world_size,
        metavar="N",
        help="number of GPUs (default: that of the script, else the smallest of the layout)",
    )
    parser.add_argument(
        "--megatron-version",
        metavar="VERSION",
        help="release of megatron-core, such as 0.16.1, or main (default: main)",
    )
    parser.add_argument(
        "--set",
        type=variable,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="value of a variable that the script does not set; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def variable(text: str) -> tuple[str, str]:
    """A variable of a script, as NAME=VALUE."""
    name, has_value, value = text.partition("=")
    if not has_value or not NAME.fullmatch(name):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def read_arguments_of(args: argparse.Namespace, rest: Sequence[str]) -> "tuple[Source, Meaning]":
    """The arguments of a script, a checkpoint or the command line, and their meaning.

    Raises:
        ConfigError: there are none.
        CheckpointError: the folder is no checkpoint of Megatron-LM.
    """
    from nanotrain.audit import sources
    from nanotrain.audit.meaning import meaning_of_flags

    path: Path | None = args.script
    if path is None:
        if not rest:
            raise ConfigError("there is nothing to audit", fix=sources.FIX)
        source = sources.source_of_words(rest)
        return source, meaning_of_flags(source.arguments)
    if path.is_dir():
        if rest:
            raise ConfigError(
                f"{rest[0]} after a checkpoint",
                why="its own arguments are read",
                fix="leave it out",
            )
        return read_checkpoint(path)
    source = sources.read_source(path, variables=dict(args.set))
    if rest:
        added = sources.source_of_words(rest).arguments
        flags = {argument.flag for argument in added}
        kept = [argument for argument in source.arguments if argument.flag not in flags]
        source = replace(source, arguments=[*kept, *added])
    return source, meaning_of_flags(source.arguments, program=source.program)


def read_checkpoint(path: Path) -> "tuple[Source, Meaning]":
    """The stored arguments of a checkpoint, and their meaning.

    Raises:
        CheckpointError: it is none of Megatron-LM, or has no arguments.
    """
    from nanotrain.audit.meaning import meaning_of_stored
    from nanotrain.audit.sources import source_of_stored
    from nanotrain.interop.megatron.folder import find_step_folder, read_common_state

    folder = find_step_folder(path)
    stored = read_common_state(folder).arguments
    if not stored:
        raise CheckpointError(
            f"{folder} has no arguments",
            why="common.pt has no args, which describe the run",
            fix="name a launch script, or a checkpoint of Megatron-LM's training program",
        )
    return source_of_stored(str(folder), stored), meaning_of_stored(stored)
