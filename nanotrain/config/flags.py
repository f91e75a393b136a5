"""The command line as data: flags, Hydra overrides and choices of YAML, in any order.

A flag is a field's name in kebab case (`--flag value`, `--flag=value`, `--flag`/`--no-flag`); an override is Hydra's
`section.field=value`; a choice names a YAML file of a group (`+config=NAME` a recipe, `model=NAME` a model). Nothing
is read from disk here.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nanotrain.config.schema import ENTRIES, KEYS, Entry, did_you_mean, unknown, unknown_key
from nanotrain.errors import ConfigError


@dataclass(frozen=True)
class Alias:
    """A flag that stands for a value of a field; the same field said otherwise must be one of `agrees`."""

    name: str
    value: str
    agrees: tuple[str, ...]


ALIASES: dict[str, Alias] = {
    "--bf16": Alias("params_dtype", "bf16", agrees=("bf16",)),
    "--fp16": Alias("params_dtype", "fp16", agrees=("fp16",)),
    "--swiglu": Alias("activation", "swiglu", agrees=("swiglu",)),
    "--use-distributed-optimizer": Alias("data_parallel_sharding_strategy", "optim", agrees=("optim", "optim_grads")),
}
FLAGS: dict[str, Entry] = {entry.flag: entry for entry in ENTRIES.values()}
NEGATIONS: dict[str, Entry] = {f"--no-{flag[2:]}": entry for flag, entry in FLAGS.items() if entry.kind is bool}
OVERRIDE = re.compile(r"^(?P<prefix>[+~]*)(?P<key>[A-Za-z_][\w.@/]*)=(?P<value>.*)$", re.DOTALL)


@dataclass(frozen=True)
class Setting:
    """One field set on the command line: its key, the text of its value, and the words that said so."""

    key: str
    value: str | list[str]
    words: str
    is_hydra: bool = False  # the text follows Hydra's grammar: [a,b] and quotes mean something


@dataclass
class CommandLine:
    """What the words say, in their order."""

    settings: list[Setting] = field(default_factory=list)
    aliases: list[str] = field(default_factory=list)
    choices: dict[str, str] = field(default_factory=dict)  # group -> name, `config` -> the recipe
    search_path: list[str] = field(default_factory=list)
    config_name: str = "train"
    data_parallel_size: int | None = None
    wants_help: bool = False
    wants_job: bool = False
    wants_explanation: bool = False

    @property
    def explicit(self) -> frozenset[str]:
        """The keys of the fields set on the command line."""
        return frozenset(setting.key for setting in self.settings)


def parse(argv: Sequence[str]) -> CommandLine:
    """Read the words of a command line.

    Raises:
        ConfigError: an unknown flag or key, a flag without its value, a word that is neither.

    >>> line = parse(["--lr", "1e-3", "+config=tiny", "--no-shuffle", "train.seed=7"])
    >>> line.choices, [(s.key, s.value) for s in line.settings]
    ({'config': 'tiny'}, [('optim.lr', '1e-3'), ('data.shuffle', 'false'), ('train.seed', '7')])
    """
    line, words = CommandLine(), list(argv)
    while words:
        word = words.pop(0)
        if word.startswith("-"):
            read_flag(line, word, rest=words)
        elif OVERRIDE.match(word):
            read_override(line, word)
        else:
            raise stray(word, line)
    settle_aliases(line)
    return line


def read_flag(line: CommandLine, word: str, *, rest: list[str]) -> None:
    """A word that begins with a dash, and the words that belong to it (taken from `rest`)."""
    flag, has_value, value = word.partition("=")
    if flag in OWN_FLAGS:
        OWN_FLAGS[flag](line, value if has_value else take_value(flag, rest))
    elif word in SWITCHES:
        SWITCHES[word](line)
    elif word in ALIASES:
        line.aliases.append(word)
    elif flag in FLAGS:
        entry = FLAGS[flag]
        line.settings.append(read_field(entry, flag, value=value if has_value else None, rest=rest))
    elif word in NEGATIONS:
        line.settings.append(Setting(NEGATIONS[word].key, "false", word))
    elif has_value and flag in {*ALIASES, *NEGATIONS, *SWITCHES}:
        raise ConfigError(
            f"{word} gives {flag} a value", why="it takes none", fix=f"write {flag} alone or leave it out"
        )
    else:
        raise unknown("flag", flag, known=[*FLAGS, *NEGATIONS, *ALIASES, *OWN_FLAGS, *SWITCHES])


def read_field(entry: Entry, flag: str, *, value: str | None, rest: list[str]) -> Setting:
    """A field's flag with its value: behind `=`, in the next word, or for a list in all words up to the next flag."""
    if entry.kind is bool:
        return Setting(entry.key, "true" if value is None else value, flag)
    if entry.kind is list:
        items = [] if value is None else value.split()
        while rest and not begins_something(rest[0]):
            items.append(rest.pop(0))
        if not items:
            raise no_value(flag)
        return Setting(entry.key, items, " ".join([flag, *items]))
    if value is None:
        value = take_value(flag, rest)
    return Setting(entry.key, value, f"{flag} {value}")


def take_value(flag: str, rest: list[str]) -> str:
    """The word after a flag, which must be a value."""
    if not rest or begins_something(rest[0]):
        raise no_value(flag)
    return rest.pop(0)


def begins_something(word: str) -> bool:
    """Whether a word is a flag, an override or a choice rather than a value (a negative number is a value)."""
    if word.startswith("--") or word in SWITCHES:
        return True
    match = OVERRIDE.match(word)
    if match is None:
        return False
    section, dot, name = match["key"].partition(".")
    return bool(match["prefix"]) or "/" not in section and (bool(dot) and name.isidentifier() or section == "config")


def read_override(line: CommandLine, word: str) -> None:
    """A word with `=`: a field, Hydra's search path, or the choice of a YAML file."""
    match = OVERRIDE.match(word)
    assert match is not None, "parse only passes words that match"
    prefix, key, value = match["prefix"], match["key"], match["value"]
    if key == "hydra.searchpath":
        line.search_path += [path.strip().strip("'\"") for path in value.strip("[]").split(",") if path.strip()]
    elif key.startswith("hydra."):
        raise ConfigError(f"{word} has no effect", why="of Hydra's own settings only hydra.searchpath is used here")
    elif "." not in key and key not in ENTRIES:
        if prefix not in ("", "+"):
            raise ConfigError(
                f"{word} begins with {prefix}", why="a YAML file is chosen, not removed", fix=f"write {key}=NAME"
            )
        line.choices[key] = value
    elif key not in KEYS:
        raise unknown_key(key)
    elif prefix:
        raise ConfigError(f"{word} begins with {prefix}", why="every field exists already", fix=f"write {key}={value}")
    else:
        line.settings.append(Setting(key, value, word, is_hydra=True))


def settle_aliases(line: CommandLine) -> None:
    """Turn aliases into settings, in front of the others; one that another word contradicts is an error."""
    said: dict[str, list[tuple[str, str]]] = {}
    for setting in line.settings:
        said.setdefault(setting.key, []).append((str(setting.value), setting.words))
    for flag in line.aliases:
        said.setdefault(ENTRIES[ALIASES[flag].name].key, []).append((ALIASES[flag].value, flag))
    for flag in dict.fromkeys(line.aliases):
        alias = ALIASES[flag]
        key = ENTRIES[alias.name].key
        for value, words in said[key]:
            if value not in alias.agrees:
                raise ConfigError(
                    f"{flag} contradicts {words}", why=f"{flag} means {key}={alias.value}", fix="leave one of them out"
                )
        line.settings.insert(0, Setting(key, alias.value, flag))


def set_data_parallel_size(line: CommandLine, value: str) -> None:
    """`--data-parallel-size N`, which sets nothing and is checked against the world."""
    if not value.isdigit() or int(value) < 1:
        raise ConfigError(f"--data-parallel-size is {value!r}", why="it takes a whole number of at least 1")
    line.data_parallel_size = int(value)


def set_config_name(line: CommandLine, value: str) -> None:
    """`--config-name NAME`: compose another file in place of train.yaml."""
    line.config_name = value.removesuffix(".yaml")


def set_cfg(line: CommandLine, value: str) -> None:
    """`--cfg job`, as Hydra's."""
    if value != "job":
        raise ConfigError(f"--cfg is {value!r}", why="only the job's configuration can be shown", fix="write --cfg job")
    line.wants_job = True


def want_help(line: CommandLine) -> None:
    """`--help`."""
    line.wants_help = True


def want_explanation(line: CommandLine) -> None:
    """`--explain`."""
    line.wants_explanation = True


# flags that set no field, with and without a value
OWN_FLAGS: dict[str, Callable[[CommandLine, str], None]] = {
    "--config-dir": lambda line, value: line.search_path.append(value),
    "--config-name": set_config_name,
    "--data-parallel-size": set_data_parallel_size,
    "--cfg": set_cfg,
}
SWITCHES: dict[str, Callable[[CommandLine], None]] = {
    "--help": want_help,
    "-h": want_help,
    "--explain": want_explanation,
}


def no_value(flag: str) -> ConfigError:
    """The error for a flag at the end, or in front of another flag."""
    entry = FLAGS.get(flag)
    meaning = f"{flag} is {entry.field.metadata['meaning']}" if entry else ""
    return ConfigError(f"{flag} has no value", why="it takes one", fix=meaning)


def stray(word: str, line: CommandLine) -> ConfigError:
    """The error for a word that no flag took."""
    last = line.settings[-1] if line.settings else None
    if last is not None and not last.is_hydra and KEYS[last.key].kind is bool:
        return ConfigError(f"stray word {word!r}", why=f"{last.words} takes no value", fix=f"write {last.words}={word}")
    return ConfigError(
        f"stray word {word!r}", why="it is neither a flag nor key=value", fix=did_you_mean("--" + word, FLAGS)
    )
