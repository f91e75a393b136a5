"""The texts of `--help`, made from the fields and the table of Megatron-LM's flags.

--help            how arguments are written, and the options used most
--help=all        every flag by section
--help=SECTION    the flags of one section: model, model.moe, parallel, ...
--help=megatron   flags of Megatron-LM that are no field here
--help=WORD       flags whose name or meaning has the word, as in --help=clip or --help="global batch"
"""

import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator

from nanotrain.config.arguments import ALIASES, ARGUMENTS, TABLE
from nanotrain.config.megatron import Kind, megatron
from nanotrain.config.option import Entry, section_help
from nanotrain.config.schema import ENTRIES, SECTIONS, entries_of, typed
from nanotrain.config.suggest import did_you_mean
from nanotrain.errors import ConfigError

USAGE = (
    "usage: nanotrain train [--nproc-per-node N] [+config=RECIPE] [SECTION.FIELD=VALUE] [--flag VALUE] ...  "
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


def help_text(topic: str = "", *, width: int | None = None, usage: str = USAGE) -> str:
    """The help on a topic: empty for the options used most, "all", "megatron", a section, or a word
    to look for.

    Args:
        topic: topic that `--help=` names.
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
    topic = next((name for name in SECTIONS if name.rpartition(".")[2] == topic), topic)
    if topic in SECTIONS:
        return "\n".join(section_lines(topic, width))
    if topic == "all":
        sections = [line for name in SECTIONS for line in section_lines(name, width)]
        return "\n".join([*introduction(width, usage), *sections])
    if topic:
        return "\n".join(found_lines(topic, width))
    common = panel(
        "options used most",
        rows((describe(ENTRIES[name]) for name in HELP["common"].split()), width),
        width=width,
    )
    rest = (
        f"--help=WORD lists the options whose name or meaning has a word, --help=all all {len(ENTRIES)} options, "
        "--help=megatron those of Megatron-LM, --help=SECTION one of:"
    )
    topic_lines = textwrap.wrap(f"{rest} {', '.join(SECTIONS)}", width)
    return "\n".join([*introduction(width, usage), *common, *topic_lines])


def introduction(width: int, usage: str = USAGE) -> list[str]:
    """The usage, the order of precedence, the kinds of arguments, and the flags that stand for one
    value of a field.
    """
    first = textwrap.wrap(usage, width, subsequent_indent=" " * 7, break_on_hyphens=False)
    arguments = panel("arguments", rows(ARGUMENTS.items(), width), width=width)
    pairs = ((flag, f"{alias.name}={alias.value}") for flag, alias in ALIASES.items())
    aliases = panel("aliases", rows(pairs, width), width=width)
    return [*first, "", *textwrap.wrap(HELP["order"], width), "", *arguments, *aliases]


def section_lines(name: str, width: int) -> list[str]:
    """A section's sentence and its flags."""
    sentence = textwrap.wrap(section_help(SECTIONS[name]), width - FRAME)
    return panel(name, [*sentence, "", *rows(map(describe, entries_of(name)), width)], width=width)


def found_lines(word: str, width: int) -> list[str]:
    """The flags whose name or meaning has a word, by section, then those of Megatron-LM by what
    becomes of them.
    """
    texts = {word.lower(), word.lower().replace("_", "-")}

    def has_word(pair: tuple[str, str]) -> bool:
        return any(text in part.lower() for text in texts for part in pair)

    lines = [
        line
        for title, pairs in [
            *((name, [describe(entry) for entry in entries_of(name)]) for name in SECTIONS),
            ("aliases", [(flag, f"{alias.name}={alias.value}") for flag, alias in ALIASES.items()]),
            *(
                (f"Megatron-LM's flags: {title}", rows_of(kind))
                for kind, (title, _) in KINDS.items()
            ),
        ]
        if (found := list(filter(has_word, pairs)))
        for line in panel(title, rows(found, width), width=width)
    ]
    if not lines:
        topics = ["all", "megatron", *SECTIONS]
        why = f"no flag has it in its name or meaning, and the topics are {', '.join(topics)}"
        raise ConfigError(
            f"there is no help on {word!r}",
            why=why,
            fix=did_you_mean(word, topics, prefix="--help="),
        )
    return lines


def rows_of(kind: Kind) -> list[tuple[str, str]]:
    """Megatron-LM's flags of a kind, with their meaning."""
    table = megatron()
    return [
        (flag, row.meaning)
        for flag, row in (table.flags | table.patterns).items()
        if row.kind == kind
    ]


def megatron_lines(width: int) -> Iterator[str]:
    """Megatron-LM's flags that are no field, by what becomes of them."""
    text = "Flags of Megatron-LM that are no option of the same name here. --help=all lists those that are."
    yield from textwrap.wrap(text, width)
    for kind, (title, sentence) in KINDS.items():
        yield from panel(title, [sentence, "", *rows(rows_of(kind), width)], width=width)


def panel(title: str, lines: list[str], *, width: int) -> list[str]:
    """The lines in a frame with a title; the frame is of ASCII where the output has no other
    characters.

    Args:
        title: title, shorter than a line.
        lines: lines of at most `width` - FRAME characters.
        width: characters of a line, frame included.
    """
    is_utf = (sys.stdout.encoding or "").lower().startswith("utf")
    left, top, right, side, low_left, low_right = "╭─╮│╰╯" if is_utf else "+-+|++"
    head = f"{left}{top} {title} {top * (width - len(title) - 5)}{right}"
    inner = [f"{side} {line:<{width - FRAME}} {side}" for line in lines]
    return [head, *inner, f"{low_left}{top * (width - 2)}{low_right}"]


def rows(pairs: Iterable[tuple[str, str]], width: int) -> list[str]:
    """Two columns of a panel, the second wrapped at words; a long entry of the first has a line of
    its own.
    """
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
