"""`nanotrain card`: what was checked of a recipe or a family, as one command measures it."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nanotrain.cli.addresses import show, written_path
from nanotrain.cli.parser import ANY_FLAG, CommandParser
from nanotrain.config.config import Config
from nanotrain.config.flags import parse
from nanotrain.config.load import Loaded, load_line
from nanotrain.errors import EXIT_CODE, EnvironmentFault
from nanotrain.parity.card_checks import CHECKS


def card(argv: Sequence[str]) -> int:
    """Check a recipe or a family on a tiny model: conversion, layouts, resume, plan and curve.

    Layouts of two CPU processes are compared with one, and transformers with nanotrain in fp64.
    The card has every result, and what was not run with the reason. It takes about two minutes.
    """
    parser = card_parser()
    args, rest = parser.parse_known_args(argv)
    only = [name.strip() for name in args.only.split(",")] if args.only else list(CHECKS)
    unknown = sorted(set(only) - set(CHECKS))
    if unknown:
        parser.error(f"--only has {', '.join(unknown)}; the checks are {', '.join(CHECKS)}")
    if args.family is not None and rest:
        parser.error(f"--family takes no settings of a training: {' '.join(rest)}")
    loaded = load_family(args.family) if args.family else load_line(parse(rest))
    subject = name_subject(args.family, loaded)
    from nanotrain.parity.card import make_card

    written = [word for word in argv if word != "--json"]
    command = shlex.join(["nanotrain", "card", *written])
    result = make_card(loaded, subject=subject, command=command, only=only)
    if args.output is not None:
        name = args.family or (Path(loaded.recipe).stem if loaded.recipe else "settings")
        write(args.output, {f"{name}.md": result.text(), f"{name}.json": result.to_json()})
    show((result.to_json() if args.json else result.text()).rstrip())
    return 0 if result.holds else EXIT_CODE


def name_subject(family: str | None, loaded: Loaded) -> str:
    """The subject of a card: "recipe tiny", "family llama", or settings without a recipe."""
    if family is not None:
        return f"family {family}"
    return f"recipe {loaded.recipe}" if loaded.recipe else "settings"


def card_parser() -> CommandParser:
    """The parser of `nanotrain card`."""
    parser = CommandParser("card", card, epilog=ANY_FLAG)
    parser.add_argument(
        "--family",
        metavar="NAME",
        help="a family of Hugging Face in place of a recipe, in the sizes of its class",
    )
    parser.add_argument(
        "--only",
        metavar="NAMES",
        help=f"checks to run, separated by commas (default: all, {', '.join(CHECKS)})",
    )
    parser.add_argument("--json", action="store_true", help="print the card as JSON")
    parser.add_argument(
        "--output",
        type=written_path,
        metavar="FOLDER",
        help="also write NAME.md and NAME.json into this folder",
    )
    return parser


def load_family(name: str) -> Loaded:
    """A configuration with the model that transformers' class of a family has by default."""
    from nanotrain.interop.hf.families import config_from_hf

    model_config = config_from_hf({"model_type": name})
    return Loaded(replace(Config(), model=model_config), {})


def write(folder: Path, texts: dict[str, str]) -> None:
    """Write the files of a card.

    Raises:
        EnvironmentFault: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text)
    except OSError as error:
        raise EnvironmentFault(
            f"cannot write the card into {folder}",
            why=error.strerror or str(error),
            fix="name another folder",
        ) from None
