"""The parser of the command line: flags, Hydra overrides and choices of YAML files, in any order.

flags       a field's name in kebab case: `--flag value`, `--flag=value`, `--flag`/`--no-flag`
overrides   Hydra's `section.field=value` and `++section.field=value` set a field,
            `~section.field` returns it to its default
choices     a YAML file of a group: `+config=NAME` a recipe, `model=NAME` a model

No file is read here. `overrides.py` reads Hydra's forms, `command_line.py` has the result.
"""

import itertools
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from nanotrain.config.arguments import (
    ALIASES,
    FLAGS,
    NEGATIONS,
    NO_HYPHENS,
    SWITCHES,
    VALUES,
    holds_several,
    no_hyphen,
    no_value,
    quoted,
    spaced,
    takes_no_value,
    unexpected,
    unknown_flag,
)
from nanotrain.config.command_line import CommandLine, MegatronArgument, Setting
from nanotrain.config.megatron import MANY, MegatronFlag, megatron, row_of
from nanotrain.config.option import Entry
from nanotrain.config.overrides import (
    DELETION,
    OVERRIDE,
    begins_argument,
    is_override,
    read_override,
)
from nanotrain.config.schema import BOOLEANS, ENTRIES, KEYS, SECTIONS
from nanotrain.config.suggest import LISTED_BY
from nanotrain.errors import ConfigError


def parse(argv: Sequence[str], *, listed_by: str = LISTED_BY) -> CommandLine:
    """Parse the arguments of a command line; mistakes are collected in `errors`.

    Args:
        argv: the arguments.
        listed_by: the command that lists the flags, which errors name.

    >>> line = parse(["--lr", "1e-3", "+config=tiny", "--no-shuffle", "train.seed=7"])
    >>> line.choices
    {'config': 'tiny'}
    >>> [(setting.key, setting.value) for setting in line.settings]
    [('optim.lr', '1e-3'), ('data.shuffle', 'false'), ('train.seed', '7')]
    """
    line = CommandLine(listed_by=listed_by)
    rest = list(argv)
    previous = ""
    while rest:
        argument = rest.pop(0)
        with line.errors:
            if holds_several(argument):
                raise quoted(argument)
            if argument.startswith("-"):
                read_flag(line, argument, rest=rest)
            elif argument.startswith(NO_HYPHENS):
                take_values(rest)  # they are no further mistakes
                raise no_hyphen(argument)
            elif OVERRIDE.match(argument) or DELETION.match(argument):
                read_override(line, argument)
            elif argument in KEYS or argument == "+config":
                raise spaced(argument, rest=take_values(rest))
            else:
                raise unexpected(argument, previous=previous, listed_by=listed_by)
        previous = argument
    note_replaced_settings(line)
    apply_aliases(line)
    return line


@dataclass(frozen=True)
class Flag:
    """One argument that begins with a dash."""

    text: str  # the argument as written, as `--lr=1e-3`
    name: str  # the part before `=`
    value: str | None  # the part after `=`; None without `=`

    @classmethod
    def split(cls, argument: str) -> "Flag":
        name, has_value, value = argument.partition("=")
        return cls(argument, name, value if has_value else None)


def read_flag(line: CommandLine, argument: str, *, rest: list[str]) -> None:
    """Read a flag; its values are taken from `rest`."""
    flag = Flag.split(argument)
    if flag.name in HELP:
        line.help_topic = help_topic(flag, rest)
    elif flag.name in OWN_FLAGS:
        value = take_value(flag.name, rest) if flag.value is None else flag.value
        OWN_FLAGS[flag.name](line, value)
    elif argument in SWITCHES:
        setattr(line, SWITCHES[argument], True)
    elif argument in ALIASES:
        line.aliases.append(argument)
    elif flag.name in FLAGS:
        line.settings += read_field(flag, rest=rest)
    elif argument in NEGATIONS:
        line.settings.append(Setting(NEGATIONS[argument].key, "false", argument))
    else:
        read_other_flag(line, flag, rest=rest)


def help_topic(flag: Flag, rest: list[str]) -> str:
    """The topic of `--help=TOPIC` or `--help TOPIC`; empty for `--help`."""
    if flag.value is not None:
        return flag.value
    return rest.pop(0) if rest and rest[0] in TOPICS else ""


def read_other_flag(line: CommandLine, flag: Flag, *, rest: list[str]) -> None:
    """Read a flag of Megatron-LM that is no field.

    Raises:
        ConfigError: the flag is none of them either.
    """
    row = None if flag.name in NEGATIONS else row_of(flag.name)
    if row is not None:
        line.megatron.append(read_megatron(flag, row, rest=rest))
        return
    if flag.value is not None and flag.name in {*ALIASES, *NEGATIONS, *SWITCHES}:
        raise takes_no_value(flag.name, flag.value)
    take_values(rest)  # they are no further mistakes
    if " " in flag.name:
        raise quoted(flag.text)
    refused = {name for name, other in megatron().flags.items() if other.kind == "not yet"}
    known = [name for name in known_flags() if name not in refused]
    raise unknown_flag(flag.name, known=known, listed_by=line.listed_by)


def split_settings(
    argv: Sequence[str], *, own: Collection[str], with_value: Collection[str]
) -> tuple[list[str], list[str]]:
    """Split the arguments of a command into settings of a training and all others.

    Args:
        argv: the arguments.
        own: flags of the command itself.
        with_value: flags of the command that take one value.

    >>> line = ["--seq-length", "8", "run", "--json", "train.seed=1"]
    >>> split_settings(line, own={"--json"}, with_value=())
    (['--seq-length', '8', 'train.seed=1'], ['run', '--json'])
    """
    settings: list[str] = []
    others: list[str] = []
    rest = list(argv)
    known = {*known_flags(), *HELP}
    while rest and rest[0] != "--":
        argument = rest.pop(0)
        name = argument.partition("=")[0]
        if name in own:
            others.append(argument)
            if argument in with_value and rest:
                others.append(rest.pop(0))
        elif name in known or (name.startswith("--") and row_of(name)):
            settings += [argument, *values_of_flag(argument, rest)]
        elif is_override(argument):
            settings.append(argument)
        else:
            others.append(argument)
    return settings, others + rest


def values_of_flag(argument: str, rest: list[str]) -> list[str]:
    """The arguments that a flag of a training takes; they are removed from `rest`."""
    before = list(rest)
    line = CommandLine()
    with line.errors:  # found again when the settings are parsed
        read_flag(line, argument, rest=rest)
    # a value of a flag that takes none, which its error names
    if rest[:1] in (["true"], ["false"]):
        rest.pop(0)
    return before[: len(before) - len(rest)]


def known_flags() -> list[str]:
    """Every flag of a training but --help."""
    return [*FLAGS, *NEGATIONS, *ALIASES, *OWN_FLAGS, *SWITCHES, *megatron().flags]


def read_field(flag: Flag, *, rest: list[str]) -> list[Setting]:
    """The setting of a field's flag; two for Megatron-LM's `--save DIR`.

    The value is what follows `=`, or the next argument, or for a list all arguments up to the next
    flag.
    """
    entry = FLAGS[flag.name]
    if flag.name == "--save":
        settings = read_save(flag, rest)
        if settings:
            return settings
    if entry.kind is bool:
        return [Setting(entry.key, "true" if flag.value is None else flag.value, flag.name)]
    if entry.kind is list:
        items = [*(flag.value or "").split(), *take_values(rest)]
        if not items:
            raise no_value(flag.name)
        return [Setting(entry.key, items, " ".join([flag.name, *items]))]
    value = take_value(flag.name, rest) if flag.value is None else flag.value
    if holds_several(f"{flag.name}={value}"):
        raise quoted(value)
    value = without_quotes(value)
    return [Setting(entry.key, other_spelling(entry, value), f"{flag.name} {value}")]


def without_quotes(value: str) -> str:
    """A value without the quotes around it, which a shell array passes on."""
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if is_quoted else value


def other_spelling(entry: Entry, value: str) -> str:
    """The value of a field, translated from Megatron-LM's spelling if that is different."""
    # Megatron-LM's pair of left and right
    if entry.name == "window_size" and re.fullmatch(r"\(?\d+, ?0\)?", value):
        value = value.strip("()").partition(",")[0]
    return VALUES.get(entry.name, {}).get(value, value)


def read_megatron(flag: Flag, row: MegatronFlag, *, rest: list[str]) -> MegatronArgument:
    """Read a flag of Megatron-LM that is no option here, with as many values as it takes."""
    if row.arity == 0 and flag.value is not None:
        raise takes_no_value(flag.name, flag.value)
    values = [] if flag.value is None else [flag.value]
    if row.arity == MANY:
        values += take_values(rest)
    elif row.arity == 1 and not values:
        values = [take_value(flag.name, rest)]
    if row.arity != 0 and not values and flag.name in megatron().flags:
        raise no_value(flag.name)
    return MegatronArgument(flag.name, row, " ".join(values))


def read_save(flag: Flag, rest: list[str]) -> list[Setting]:
    """Megatron-LM's `--save DIR`, which also names the run folder.

    There are no settings for the field's own `--save[=true]`.
    """
    folder = flag.value
    if folder is None and rest and not begins_argument(rest[0]):
        folder = rest[0]
    if not folder or folder.lower() in BOOLEANS:
        return []
    if flag.value is None:
        rest.pop(0)
    text = f"--save {folder}"
    return [
        Setting(ENTRIES["save"].key, "true", text),
        Setting(ENTRIES["run_dir"].key, folder, text),
    ]


def take_values(rest: list[str]) -> list[str]:
    """The arguments up to the next flag, override or choice; they are removed from `rest`."""
    arguments = list(itertools.takewhile(lambda text: not begins_argument(text), rest))
    del rest[: len(arguments)]
    return arguments


def take_value(flag: str, rest: list[str]) -> str:
    """The argument after a flag, which must be a value."""
    if not rest or begins_argument(rest[0]):
        raise no_value(flag)
    return rest.pop(0)


def note_replaced_settings(line: CommandLine) -> None:
    """Note each setting that replaces an earlier one of its field by another value."""
    settings: dict[str, Setting] = {}
    for setting in line.settings:
        earlier = settings.get(setting.key, setting)
        if normalized(earlier) != normalized(setting):
            text = f"{setting.text} replaces {earlier.text}"
            if KEYS[setting.key].secret:
                text = f"the last {KEYS[setting.key].flag} replaces the one before it"
            line.overruled.append(f"{text}: of a field that is set twice, the last value counts")
        settings[setting.key] = setting


def apply_aliases(line: CommandLine) -> None:
    """Turn aliases into settings, in front of the settings of the command line.

    A contradiction with another setting is an error, unless the alias wins.
    """
    given: list[Setting] = []
    for flag in dict.fromkeys(line.aliases):
        alias = ALIASES[flag]
        key = ENTRIES[alias.name].key
        others = [other for other in (*given, *line.settings) if other.key == key]
        differing = [other for other in others if normalized(other) not in alias.agrees]
        if alias.wins and differing:
            line.overruled.append(f"{flag} replaces {differing[-1].text}, as in Megatron-LM")
            line.settings = [other for other in line.settings if other.key != key]
            differing = []
        for other in differing:
            error = ConfigError(
                f"{flag} contradicts {other.text}",
                why=f"{flag} means {key}={alias.value}",
                fix="leave one of them out",
            )
            line.errors.errors.append(error)
        given.append(Setting(key, alias.value, flag))
    line.settings[:0] = reversed(given)


def normalized(setting: Setting) -> str:
    """The text of a setting's value; truth values are "true" or "false" in any spelling."""
    text = str(setting.value)
    if KEYS[setting.key].kind is not bool:
        return text
    return str(BOOLEANS.get(text.lower(), text)).lower()


def set_data_parallel_size(line: CommandLine, value: str) -> None:
    """`--data-parallel-size N`, which sets nothing and is checked against the world."""
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(
            f"--data-parallel-size is {value!r}", why="it takes a whole number of at least 1"
        )
    line.data_parallel_size = int(value)


def set_cfg(line: CommandLine, value: str) -> None:
    """`--cfg job`, as Hydra's."""
    if value != "job":
        raise ConfigError(
            f"--cfg is {value!r}",
            why="only the job's configuration can be shown",
            fix="write --cfg job",
        )
    line.wants_job = True


# flags that set no field, and how each reads its value
OWN_FLAGS: dict[str, Callable[[CommandLine, str], None]] = {
    "--config-dir": lambda line, value: line.search_path.append(value),
    "--config-name": lambda line, value: setattr(line, "config_name", value.removesuffix(".yaml")),
    "--data-parallel-size": set_data_parallel_size,
    "--cfg": set_cfg,
}
HELP = ("--help", "-h")
TOPICS = ("all", "megatron", *SECTIONS)
