"""The texts of `--help`, made from the fields and the table of Megatron-LM's flags.

--help            how arguments are written, and the options used most
--help=all        every flag by section
--help=SECTION    the flags of one section: model, model.moe, parallel, ...
--help=megatron   flags of Megatron-LM that are no field here
--help=WORD       flags whose name or meaning has the word: --help=clip, --help="global batch"
"""

import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from nanotrain.config.arguments import ALIASES, ARGUMENTS, TABLE
from nanotrain.config.megatron import Kind, megatron
from nanotrain.config.option import Entry, section_help
from nanotrain.config.schema import ENTRIES, SECTIONS, entries_of, typed
from nanotrain.config.suggest import did_you_mean
from nanotrain.errors import ConfigError

USAGE = (
    "usage: nanotrain train [--nproc-per-node N] [+config=RECIPE] [SECTION.FIELD=VALUE] "
    "[--flag VALUE] ...  "
    "(torchrun's options; also torchrun --nproc-per-node N -m nanotrain.train ...)"
)
CONFIG_USAGE = (
    "usage: nanotrain config [--explain] [+config=RECIPE] [SECTION.FIELD=VALUE] [--flag VALUE] ..."
)
HELP = TABLE["help"]
KINDS: dict[Kind, tuple[str, str]] = HELP["kinds"]  # title, sentence
# characters: where meanings begin, and what the frame of a panel takes of a line
COLUMN, FRAME = 36, 4
MIN_WIDTH, MAX_WIDTH = 60, 120  # characters of a line


class Frame(NamedTuple):
    """The characters of a panel's frame."""

    top_left: str
    horizontal: str
    top_right: str
    vertical: str
    low_left: str
    low_right: str


UNICODE_FRAME = Frame("╭", "─", "╮", "│", "╰", "╯")
ASCII_FRAME = Frame("+", "-", "+", "|", "+", "+")


def help_text(topic: str = "", *, width: int | None = None, usage: str = USAGE) -> str:
    """The help on a topic; without one, the options used most.

    Args:
        topic: "all", "megatron", a section, or a word to look for.
        width: characters of a line; unset: the width of the terminal.
        usage: usage line of the command.

    Raises:
        ConfigError: neither a topic nor a word of any flag.
    """
    if width is None:
        width = shutil.get_terminal_size().columns
    width = min(max(width, MIN_WIDTH), MAX_WIDTH)
    if topic == "megatron":
        return "\n".join(megatron_lines(width))
    for name in SECTIONS:
        if topic in (name, name.rpartition(".")[2]):
            return "\n".join(section_lines(name, width))
    if topic == "all":
        lines = introduction(width, usage)
        for name in SECTIONS:
            lines += section_lines(name, width)
        return "\n".join(lines)
    if topic:
        return "\n".join(found_lines(topic, width))
    return "\n".join([*introduction(width, usage), *common_lines(width)])


def common_lines(width: int) -> list[str]:
    """The options used most, and the topics."""
    pairs = [describe(ENTRIES[name]) for name in HELP["common"].split()]
    topics = (
        "--help=WORD lists the options whose name or meaning has a word, "
        f"--help=all all {len(ENTRIES)} options, --help=megatron those of Megatron-LM, "
        f"--help=SECTION one of: {', '.join(SECTIONS)}"
    )
    return [
        *panel("options used most", rows(pairs, width), width=width),
        *textwrap.wrap(topics, width),
    ]


def introduction(width: int, usage: str = USAGE) -> list[str]:
    """The usage, the order of precedence, the kinds of arguments, and the aliases."""
    return [
        *textwrap.wrap(usage, width, subsequent_indent=" " * 7, break_on_hyphens=False),
        "",
        *textwrap.wrap(HELP["order"], width),
        "",
        *panel("arguments", rows(ARGUMENTS.items(), width), width=width),
        *panel("aliases", rows(describe_aliases(), width), width=width),
    ]


def describe_aliases() -> list[tuple[str, str]]:
    """The flags that stand for one value of a field, each with this value."""
    return [(flag, f"{alias.name}={alias.value}") for flag, alias in ALIASES.items()]


def section_lines(name: str, width: int) -> list[str]:
    """A section's sentence and its flags."""
    sentence = textwrap.wrap(section_help(SECTIONS[name]), width - FRAME)
    pairs = [describe(entry) for entry in entries_of(name)]
    return panel(name, [*sentence, "", *rows(pairs, width)], width=width)


def found_lines(word: str, width: int) -> list[str]:
    """The flags whose name or meaning has a word, by section; then Megatron-LM's flags by kind.

    Raises:
        ConfigError: no flag has it.
    """
    groups: dict[str, list[tuple[str, str]]] = {}
    for name in SECTIONS:
        groups[name] = [describe(entry) for entry in entries_of(name)]
    groups["aliases"] = describe_aliases()
    for kind, (title, _) in KINDS.items():
        groups[f"Megatron-LM's flags: {title}"] = rows_of(kind)
    lines: list[str] = []
    for title, pairs in groups.items():
        matching = [(flag, text) for flag, text in pairs if has_word(word, flag, meaning=text)]
        if matching:
            lines += panel(title, rows(matching, width), width=width)
    if not lines:
        topics = ["all", "megatron", *SECTIONS]
        raise ConfigError(
            f"there is no help on {word!r}",
            why="no flag has it in its name or meaning, and the topics are " + ", ".join(topics),
            fix=did_you_mean(word, topics, prefix="--help="),
        )
    return lines


def has_word(word: str, flag: str, *, meaning: str) -> bool:
    """Whether a flag or its meaning has a word, also with hyphens in place of underscores."""
    spellings = (word.lower(), word.lower().replace("_", "-"))
    return any(text in flag.lower() or text in meaning.lower() for text in spellings)


def rows_of(kind: Kind) -> list[tuple[str, str]]:
    """Megatron-LM's flags of a kind, with their meaning."""
    table = megatron().flags | megatron().patterns
    return [(flag, row.meaning) for flag, row in table.items() if row.kind == kind]


def megatron_lines(width: int) -> Iterator[str]:
    """Help on Megatron-LM's flags that are no option here: one panel per kind of `KINDS`."""
    text = (
        "Flags of Megatron-LM that are no option of the same name here. "
        "--help=all lists those that are."
    )
    yield from textwrap.wrap(text, width)
    for kind, (title, sentence) in KINDS.items():
        yield from panel(title, [sentence, "", *rows(rows_of(kind), width)], width=width)


def panel(title: str, lines: list[str], *, width: int) -> list[str]:
    """The lines in a frame with a title, of ASCII if the output has no other characters.

    Args:
        title: title, shorter than a line.
        lines: lines of at most `width` - FRAME characters.
        width: characters of a line, frame included.
    """
    is_utf = (sys.stdout.encoding or "").lower().startswith("utf")
    frame = UNICODE_FRAME if is_utf else ASCII_FRAME
    line_after_title = frame.horizontal * (width - len(title) - 5)
    return [
        f"{frame.top_left}{frame.horizontal} {title} {line_after_title}{frame.top_right}",
        *(f"{frame.vertical} {line:<{width - FRAME}} {frame.vertical}" for line in lines),
        f"{frame.low_left}{frame.horizontal * (width - 2)}{frame.low_right}",
    ]


def rows(pairs: Iterable[tuple[str, str]], width: int) -> list[str]:
    """Two columns of a panel, the second wrapped at words; a long first entry has its own line."""
    lines: list[str] = []
    for left, right in pairs:
        wrapped = textwrap.wrap(right, width - FRAME - COLUMN, break_on_hyphens=False)
        if len(left) + 2 > COLUMN:
            lines += textwrap.wrap(
                left, width - FRAME, subsequent_indent="  ", break_on_hyphens=False
            )
        else:
            lines.append(f"{left:<{COLUMN}}{wrapped.pop(0)}")
        lines += [" " * COLUMN + line for line in wrapped]
    return lines


def describe(entry: Entry) -> tuple[str, str]:
    """The columns of one field: flag and values, meaning and default."""
    flag = f"--[no-]{entry.flag[2:]}" if entry.kind is bool else f"{entry.flag} {metavar(entry)}"
    return flag, f"{entry.help} (default: {typed(entry.default)})"


def metavar(entry: Entry) -> str:
    """The placeholder for a flag's value.

    >>> metavar(ENTRIES["lr"]), metavar(ENTRIES["device"])
    ('NUMBER', '{auto,cpu,cuda}')
    """
    names = {bool: "true|false", int: "N", float: "NUMBER", str: "TEXT"}
    one = "{" + ",".join(entry.choices) + "}" if entry.choices else names[entry.item]
    return f"{one} ..." if entry.kind is list else one
