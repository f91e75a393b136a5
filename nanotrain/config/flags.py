"""The parser of the command line: flags, Hydra overrides and choices of YAML files, in any order.

A flag is a field's name in kebab case (`--flag value`, `--flag=value`, `--flag`/`--no-flag`); an
override is Hydra's `section.field=value`; a choice names a YAML file of a group (`+config=NAME` a
recipe, `model=NAME` a model). No file is read here.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from nanotrain.config.arguments import (
    ALIASES,
    FLAGS,
    NEGATIONS,
    NO_HYPHENS,
    SWITCHES,
    VALUES,
    choice_of,
    no_hyphen,
    no_value,
    quoted,
    spaced,
    takes_no_value,
    unexpected,
    unknown_flag,
)
from nanotrain.config.megatron import MANY, MegatronFlag, megatron, row_of
from nanotrain.config.option import Entry
from nanotrain.config.schema import BOOLEANS, ENTRIES, KEYS, SECTIONS, unknown_key
from nanotrain.config.suggest import LISTED_BY
from nanotrain.errors import ConfigError, ErrorCollector

OVERRIDE = re.compile(r"^(?P<prefix>[+~]*)(?P<key>[A-Za-z_][\w.@/]*)=(?P<value>.*)$", re.DOTALL)


@dataclass(frozen=True)
class Setting:
    """One field set on the command line: its key, the text of its value, and the arguments as
    written.
    """

    key: str
    value: str | list[str]
    text: str
    is_hydra: bool = False  # the text follows Hydra's grammar: [a,b] and quotes mean something


@dataclass(frozen=True)
class MegatronArgument:
    """A flag of Megatron-LM that is no field: a row of `tables/megatron.yaml`."""

    flag: str
    row: MegatronFlag = field(compare=False)
    value: str = ""  # several values are separated by spaces

    @property
    def text(self) -> str:
        """The argument as written."""
        return f"{self.flag} {self.value}".strip()


@dataclass
class CommandLine:
    """A parsed command line."""

    settings: list[Setting] = field(default_factory=list)  # the fields that are set, in order
    aliases: list[str] = field(default_factory=list)  # alias flags, in order
    megatron: list[MegatronArgument] = field(default_factory=list)  # flags of Megatron-LM, in order
    # group of YAML files -> name of the chosen file; `config` -> the recipe
    choices: dict[str, str] = field(default_factory=dict)
    search_path: list[str] = field(default_factory=list)  # folders of `--config-dir`
    config_name: str = "train"  # the file that composition starts from
    data_parallel_size: int | None = None  # value of `--data-parallel-size`
    help_topic: str | None = None  # value of `--help=TOPIC`; empty for `--help`
    wants_megatron_defaults: bool = False
    wants_job: bool = False
    wants_explanation: bool = False
    listed_by: str = LISTED_BY  # the command that lists the flags, for errors
    # all mistakes; `load_line` raises them together with mistakes in types
    errors: ErrorCollector = field(default_factory=ErrorCollector)

    @property
    def explicit(self) -> frozenset[str]:
        """The keys of the fields set on the command line."""
        return frozenset(setting.key for setting in self.settings)

    @property
    def megatron_rows(self) -> dict[str, MegatronFlag]:
        """The rows of Megatron-LM's flags, by flag, in order."""
        return {argument.flag: argument.row for argument in self.megatron}


def parse(argv: Sequence[str], *, listed_by: str = LISTED_BY) -> CommandLine:
    """Parse the arguments of a command line; mistakes are collected in `errors`, which name
    `listed_by` for help.

    >>> line = parse(["--lr", "1e-3", "+config=tiny", "--no-shuffle", "train.seed=7"])
    >>> line.choices, [(s.key, s.value) for s in line.settings]
    ({'config': 'tiny'}, [('optim.lr', '1e-3'), ('data.shuffle', 'false'), ('train.seed', '7')])
    """
    line, rest, flag = CommandLine(listed_by=listed_by), list(argv), ""
    while rest:
        argument = rest.pop(0)
        with line.errors:
            if argument.startswith("-"):
                read_flag(line, argument, rest=rest)
            elif argument.startswith(NO_HYPHENS):
                take_values(rest)  # they are no further mistakes
                raise no_hyphen(argument)
            elif OVERRIDE.match(argument):
                read_override(line, argument)
            elif argument in KEYS or argument == "+config":
                raise spaced(argument, rest=take_values(rest))
            else:
                raise unexpected(argument, previous=flag, listed_by=listed_by)
        flag = argument
    apply_aliases(line)
    return line


def read_flag(line: CommandLine, argument: str, *, rest: list[str]) -> None:
    """Read a flag; its values are taken from `rest`."""
    flag, has_value, text = argument.partition("=")
    value = text if has_value else None
    if flag in HELP:
        line.help_topic = text if has_value or not rest or rest[0] not in TOPICS else rest.pop(0)
    elif flag in OWN_FLAGS:
        OWN_FLAGS[flag](line, text if has_value else take_value(flag, rest))
    elif argument in SWITCHES:
        setattr(line, SWITCHES[argument], True)
    elif argument in ALIASES:
        line.aliases.append(argument)
    elif flag == "--save" and (settings := read_save(argument, rest)):
        line.settings += settings
    elif flag in FLAGS:
        line.settings.append(read_field(FLAGS[flag], flag, value=value, rest=rest))
    elif argument in NEGATIONS:
        line.settings.append(Setting(NEGATIONS[argument].key, "false", argument))
    elif flag not in NEGATIONS and (row := row_of(flag)) is not None:
        line.megatron.append(read_megatron(flag, row, value=value, rest=rest))
    elif has_value and flag in {*ALIASES, *NEGATIONS, *SWITCHES}:
        raise takes_no_value(flag, text)
    else:
        take_values(rest)  # they are no further mistakes
        if " " in flag:
            raise quoted(argument)
        known, table = known_flags(), megatron().flags
        known = [name for name in known if name not in table or table[name].kind != "not yet"]
        raise unknown_flag(flag, known=known, listed_by=line.listed_by)


def split_settings(
    argv: Sequence[str], *, own: Collection[str], with_value: Collection[str]
) -> tuple[list[str], list[str]]:
    """The settings of a training among the arguments of a command, with their values; and all other
    arguments.

    Args:
        argv: the arguments.
        own: flags of the command itself.
        with_value: flags of the command that take one value.

    >>> split_settings(["--seq-length", "8", "run", "--json", "train.seed=1"], own={"--json"}, with_value=())
    (['--seq-length', '8', 'train.seed=1'], ['run', '--json'])
    """
    settings: list[str] = []
    others: list[str] = []
    rest, known = list(argv), {*known_flags(), *HELP}
    while rest and rest[0] != "--":
        argument = rest.pop(0)
        flag, has_value, _ = argument.partition("=")
        if flag in own:
            others += [argument, *rest[: argument in with_value]]
            del rest[: argument in with_value]
        elif flag in known or flag.startswith("--") and row_of(flag):
            before, line = list(rest), CommandLine()
            with line.errors:  # found again when the settings are parsed
                read_flag(line, argument, rest=rest)
            # of a flag without a value, which its error names
            if rest[:1] in (["true"], ["false"]):
                rest.pop(0)
            settings += [argument, *before[: len(before) - len(rest)]]
        elif has_value and flag in ("+config", *KEYS):
            settings.append(argument)
        else:
            others.append(argument)
    return settings, others + rest


def known_flags() -> list[str]:
    """Every flag of a training but --help."""
    return [*FLAGS, *NEGATIONS, *ALIASES, *OWN_FLAGS, *SWITCHES, *megatron().flags]


def read_field(entry: Entry, flag: str, *, value: str | None, rest: list[str]) -> Setting:
    """A field's flag and its value: after `=`, the next argument, or for a list all arguments up to
    the next flag.
    """
    if entry.kind is bool:
        return Setting(entry.key, "true" if value is None else value, flag)
    if entry.kind is list:
        items = [*(value or "").split(), *take_values(rest)]
        if not items:
            raise no_value(flag)
        return Setting(entry.key, items, " ".join([flag, *items]))
    if value is None:
        value = take_value(flag, rest)
    # quotes inside a shell array reach us
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1]
    text = f"{flag} {value}"
    # Megatron-LM's pair of left and right
    if entry.name == "window_size" and re.fullmatch(r"\(?\d+, ?0\)?", value):
        value = value.strip("()").partition(",")[0]
    return Setting(entry.key, VALUES.get(entry.name, {}).get(value, value), text)


def read_megatron(
    flag: str, row: MegatronFlag, *, value: str | None, rest: list[str]
) -> MegatronArgument:
    """A flag of Megatron-LM with as many values as it takes; one of a pattern may take none."""
    arity = row.arity
    if arity == 0 and value is not None:
        raise takes_no_value(flag, value)
    values = [] if value is None else [value]
    if arity == MANY:
        values += take_values(rest)
    elif arity == 1 and not values:
        values = [take_value(flag, rest)]
    if arity and not values and flag in megatron().flags:
        raise no_value(flag)
    return MegatronArgument(flag, row, " ".join(values))


def read_save(argument: str, rest: list[str]) -> list[Setting]:
    """Megatron-LM's `--save DIR`, which also names the run folder; nothing for the field's own
    `--save[=true]`.
    """
    _, has_value, folder = argument.partition("=")
    if not has_value and rest and not begins_argument(rest[0]):
        folder = rest[0]
    if not folder or folder.lower() in BOOLEANS:
        return []
    del rest[: not has_value]
    values = {"save": "true", "run_dir": folder}
    return [Setting(ENTRIES[name].key, value, f"--save {folder}") for name, value in values.items()]


def take_values(rest: list[str]) -> list[str]:
    """The arguments up to the next flag, override or choice; they are removed from `rest`."""
    count = next((index for index, text in enumerate(rest) if begins_argument(text)), len(rest))
    taken, rest[:] = rest[:count], rest[count:]
    return taken


def take_value(flag: str, rest: list[str]) -> str:
    """The argument after a flag, which must be a value."""
    if not rest or begins_argument(rest[0]):
        raise no_value(flag)
    return rest.pop(0)


def begins_argument(text: str) -> bool:
    """Whether a text is a flag, an override or a choice and not a value (a negative number is a
    value).
    """
    if re.match(r"--|-(?!inf|nan)[A-Za-z]", text):
        return True
    match = OVERRIDE.match(text)
    if match is None:
        return False
    section, dot, name = match["key"].partition(".")
    is_key = bool(dot) and all(part.isidentifier() for part in name.split("."))
    is_name = not dot and section in {"config", *SECTIONS, *ENTRIES}
    return bool(match["prefix"]) or "/" not in section and (is_key or is_name)


def read_override(line: CommandLine, argument: str) -> None:
    """Read an argument with `=`: a field, Hydra's search path, or the choice of a YAML file."""
    match = OVERRIDE.match(argument)
    assert match is not None, "parse only passes arguments that match"
    prefix, key, value = match["prefix"], match["key"], match["value"]
    if key == "hydra.searchpath":
        line.search_path += [
            path.strip().strip("'\"") for path in value.strip("[]").split(",") if path.strip()
        ]
    elif key.startswith("hydra."):
        raise ConfigError(
            f"{argument} has no effect",
            why="of Hydra's own settings only hydra.searchpath is used here",
        )
    elif "." not in key and key not in ENTRIES:
        if prefix not in ("", "+"):
            why, fix = "a YAML file is chosen, not removed or added", f"write {choice_of(key)}=NAME"
            raise ConfigError(f"{argument} begins with {prefix}", why=why, fix=fix)
        line.choices[key] = value  # as of a flag, the last one
    elif key not in KEYS:
        flag = f"--{key.rpartition('.')[2].replace('_', '-')}"
        is_megatron = flag in megatron().flags and megatron().flags[flag].kind == "rename"
        raise (
            ConfigError(f"unknown key {key}", fix=f"write {flag}")
            if is_megatron
            else unknown_key(key)
        )
    elif prefix:
        why, fix = "every field exists already", f"write {key}={value}"
        raise ConfigError(f"{argument} begins with {prefix}", why=why, fix=fix)
    else:
        line.settings.append(Setting(key, value, argument, is_hydra=True))


def apply_aliases(line: CommandLine) -> None:
    """Turn aliases into settings, before the others; a contradiction with another argument is an
    error.
    """
    aliases = [(flag, ALIASES[flag], ENTRIES[ALIASES[flag].name].key) for flag in line.aliases]
    given: list[Setting] = []
    settings = list(line.settings)
    for flag, alias, key in dict.fromkeys(aliases):
        for other in [*given, *settings]:
            if other.key == key and agreed(other) not in alias.agrees:
                why, fix = f"{flag} means {key}={alias.value}", "leave one of them out"
                line.errors.errors.append(
                    ConfigError(f"{flag} contradicts {other.text}", why=why, fix=fix)
                )
        given.append(Setting(key, alias.value, flag))
    line.settings[:0] = reversed(given)


def agreed(setting: Setting) -> str:
    """The text of a value, with one spelling of true and of false."""
    text = str(setting.value)
    return str(BOOLEANS.get(text.lower(), text)).lower() if KEYS[setting.key].kind is bool else text


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


# Flags that set no field: with a value, and without (the attribute of CommandLine that becomes
# true).
OWN_FLAGS: dict[str, Callable[[CommandLine, str], None]] = {
    "--config-dir": lambda line, value: line.search_path.append(value),
    "--config-name": lambda line, value: setattr(line, "config_name", value.removesuffix(".yaml")),
    "--data-parallel-size": set_data_parallel_size,
    "--cfg": set_cfg,
}
HELP, TOPICS = ("--help", "-h"), ("all", "megatron", *SECTIONS)
