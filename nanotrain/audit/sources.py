"""Where arguments of Megatron-LM come from.

    read_source      a launch script, a file of arguments, or the MODEL_ARGS of a YAML file
    source_of_words  arguments of this command line
    source_of_stored the stored arguments of a checkpoint

A script is followed as text (shell_script.py); nothing is run.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanotrain.audit.arguments import Argument, FlagValues, read_arguments
from nanotrain.audit.launch_ranks import (
    MAX_RANKS,
    batch_options,
    count_in,
    limited,
    ranks_of_launch,
)
from nanotrain.audit.shell_script import Script, read_script
from nanotrain.audit.shell_values import MARK, unset_names, without_marks
from nanotrain.config.arguments import FLAGS
from nanotrain.config.flags import known_flags
from nanotrain.config.megatron import row_of
from nanotrain.config.option import flag_of
from nanotrain.errors import ConfigError
from nanotrain.interop.megatron.arguments import TABLE
from nanotrain.untrusted import parse_yaml, plain_text, read_file, unreadable

DEFAULTS: dict[str, Any] = TABLE["defaults"]  # of Megatron-LM, where they ask for something
MAX_BYTES = 1 << 18
MAX_WORDS = 5_000
FIX = "name a launch script, a file of arguments, or a folder of --save"
# variables of a script that decide what Megatron-LM accepts
VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS",)
# several values of a flag in a YAML file, but not a pattern such as [0]*3+[1]*58
WORDS_IN_BRACKETS = re.compile(r"\[[A-Za-z_][\w. ]*\]")
# sizes of the groups of a model, and of its experts
MODEL_SIZES = frozenset(
    {
        "--tensor-model-parallel-size",
        "--pipeline-model-parallel-size",
        "--context-parallel-size",
    }
)
EXPERT_SIZES = frozenset(
    {"--num-experts", "--expert-model-parallel-size", "--expert-tensor-parallel-size"}
)
DATA_PARALLEL_SIZE = "--data-parallel-size"
EXPERT_DATA_PARALLEL_SIZE = "data-parallel size of experts"  # no flag has it


@dataclass
class Source:
    """The arguments of a training of Megatron-LM, from a script, a log or a checkpoint."""

    name: str  # the file, for the report
    arguments: list[Argument]
    program: str = ""  # the Python file that is launched
    has_run: bool = False  # Megatron-LM has accepted the arguments
    ranks: int | None = None  # number of GPUs, where the script has it
    variables: dict[str, str] = field(default_factory=dict)  # values of the names in VARIABLES
    notes: list[str] = field(default_factory=list)  # parts of the script that were left out
    # unset variables, with the flags whose values they are
    unset: dict[str, list[str]] = field(default_factory=dict)

    def values(self, ranks: int | None) -> FlagValues:
        """The flags and variables by name, with data-parallel sizes where they are known."""
        arguments = list(self.arguments)
        arguments += [Argument(name, (value,)) for name, value in self.variables.items()]
        values = FlagValues.of(arguments)
        unset = {flag for flags in self.unset.values() for flag in flags}
        if unset.isdisjoint(MODEL_SIZES):
            arguments += data_parallel_sizes(
                values, ranks, knows_experts=EXPERT_SIZES.isdisjoint(unset)
            )
        return FlagValues.of(arguments)


def data_parallel_sizes(
    values: FlagValues, ranks: int | None, *, knows_experts: bool
) -> list[Argument]:
    """The data-parallel size, and that of experts where there are some.

    Args:
        values: the flags.
        ranks: number of GPUs; None for the one that a data-parallel size among the flags implies.
        knows_experts: whether the sizes of the groups of experts are known.
    """
    tensor = values.size("--tensor-model-parallel-size")
    pipeline = values.size("--pipeline-model-parallel-size")
    model_ranks = tensor * pipeline * values.size("--context-parallel-size")
    sizes = []
    if ranks is not None:
        sizes.append(Argument(DATA_PARALLEL_SIZE, (str(ranks // model_ranks),)))
    elif values.text(DATA_PARALLEL_SIZE):
        ranks = values.size(DATA_PARALLEL_SIZE) * model_ranks
    if ranks is None or not knows_experts or values.number("--num-experts", 0) < 1:
        return sizes
    expert_tensor = tensor
    if values.text("--expert-tensor-parallel-size") is not None:
        expert_tensor = values.size("--expert-tensor-parallel-size")
    expert_ranks = expert_tensor * pipeline * values.size("--expert-model-parallel-size")
    sizes.append(Argument(EXPERT_DATA_PARALLEL_SIZE, (str(ranks // expert_ranks),)))
    return sizes


def read_source(path: Path, *, variables: Mapping[str, str]) -> Source:
    """The arguments in a file.

    Args:
        path: launch script, list of arguments, or YAML file with MODEL_ARGS.
        variables: values of variables that a script does not set.

    Raises:
        ConfigError: it cannot be read, or has no flags of Megatron-LM.
    """
    text = read_text(path)
    if path.suffix in (".yaml", ".yml"):
        return require_flags(source_of_yaml(path, text))
    script = read_script(text, variables=variables)
    return require_flags(source_of_script(str(path), script, batch=batch_options(text)))


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        ConfigError: it cannot be read, is too large, or is no text.
    """
    try:
        text = read_file(path, most=MAX_BYTES).decode()
        if "\0" in text:
            raise ValueError("it has bytes that are no text")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} cannot be read", why="it is no text", fix=FIX) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read", why=unreadable(error), fix=FIX) from None
    return text.replace("\r\n", "\n")


def require_flags(source: Source) -> Source:
    """Check that a source has flags of Megatron-LM, and not too many words.

    Raises:
        ConfigError: it has none, or too many.
    """
    known = [argument for argument in source.arguments if is_known(argument.flag)]
    if not known:
        raise ConfigError(
            f"{source.name} has no flags of Megatron-LM",
            why="; ".join(
                ["no program is launched with flags such as --num-layers", *source.notes]
            ),
            fix=FIX,
        )
    num_words = sum(len(argument.words) for argument in source.arguments)
    if num_words > MAX_WORDS:
        raise ConfigError(
            f"{source.name} has {num_words:,} words of arguments",
            why=f"at most {MAX_WORDS:,} are read",
        )
    return source


def is_known(flag: str) -> bool:
    """Whether Megatron-LM or nanotrain has a flag."""
    return flag in known_flags() or row_of(flag) is not None


def source_of_words(words: Sequence[str]) -> Source:
    """The arguments of this command line.

    Raises:
        ConfigError: there are none of Megatron-LM.
    """
    arguments, before = read_arguments(words)
    if before:
        raise ConfigError(f"unexpected argument {before[0]!r}", fix=FIX)
    return require_flags(Source("the command line", arguments))


def source_of_yaml(path: Path, text: str) -> Source:
    """The arguments of a YAML file: a mapping of flags, alone or below MODEL_ARGS.

    Raises:
        ConfigError: it has none.
    """
    try:
        content = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read", why=plain_text(str(error)), fix=FIX) from None
    rows = content.get("MODEL_ARGS", content) if isinstance(content, dict) else None
    if not isinstance(rows, dict):
        raise ConfigError(f"{path} has no flags of Megatron-LM", why="no MODEL_ARGS", fix=FIX)
    words: list[str] = []
    for flag, value in rows.items():
        if str(flag).startswith("--"):
            words += words_of_value(str(flag), value)
    source = Source(str(path), read_arguments(words)[0])
    variables = content.get("ENV_VARS")
    if isinstance(variables, dict):
        chosen = {name: str(variables[name]) for name in VARIABLES if name in variables}
        source.variables = chosen
    return source


def words_of_value(flag: str, value: Any) -> list[str]:
    """A flag of a YAML file as words; none for a switch that is off."""
    if value is True or value is None:
        return [flag]
    if value is False:
        return []
    items = value if isinstance(value, list) else [value]
    if isinstance(value, str) and WORDS_IN_BRACKETS.fullmatch(value):
        items = value[1:-1].split()
    words = [flag]
    for item in items:
        try:
            words += shlex.split(str(item)) or [""]
        except ValueError:  # quotes that are not closed are part of the text
            words.append(str(item))
    return words


def source_of_script(name: str, script: Script, *, batch: Mapping[str, str]) -> Source:
    """The arguments that a script launches a program with.

    Args:
        name: the file, for the report.
        script: the script.
        batch: options of its #SBATCH lines.
    """
    launch = chosen_launch(script)
    index = start_of_arguments(launch)
    arguments = read_arguments(launch[index:])[0]
    source = Source(name, [], notes=list(script.notes))
    if index > 0 and launch[index - 1].endswith(".py"):
        source.program = without_marks(launch[index - 1])
    if len(script.launches) > 1:
        source.notes.append(
            f"the script has {len(script.launches)} launches: the one with the most flags is read"
        )
    launcher = launch[:index]
    source.ranks = (
        ranks_of_launch(launcher, {}) or ranks_variable(script) or ranks_of_launch(launcher, batch)
    )
    for variable in VARIABLES:
        value = script.variables.get(variable)
        if isinstance(value, str):
            source.variables[variable] = value
    for argument in arguments:
        add_argument(source, argument)
    return source


def add_argument(source: Source, argument: Argument) -> None:
    """Add an argument of a script; one whose number or choice is not set is left out."""
    names = unset_names(argument.text)
    for unset in names:
        source.unset.setdefault(unset, []).append(argument.flag)
    if names and not takes_any_text(argument.flag):
        return
    values = tuple(MARK.sub(r"unset_\1", value) for value in argument.values)
    source.arguments.append(Argument(argument.flag, values))


def takes_any_text(flag: str) -> bool:
    """Whether a flag takes any text as its value, such as a path."""
    entry = FLAGS.get(flag)
    if flag == "--save":
        return True
    return entry is not None and (entry.kind is str or entry.kind is list)


def chosen_launch(script: Script) -> list[str]:
    """The launch with the most flags; without one the variables and lines that are arguments."""
    if script.launches:
        return max(script.launches, key=lambda words: num_flags(words[start_of_arguments(words) :]))
    words = list(script.loose)
    for value in script.variables.values():
        items = value.split() if isinstance(value, str) else value
        if items and items[0].startswith("--"):
            words += items
    return words


def num_flags(words: Sequence[str]) -> int:
    """The number of long flags."""
    return sum(word.startswith("--") for word in words)


def start_of_arguments(words: Sequence[str]) -> int:
    """The index after the Python file of a launch, or of the first known flag without a file."""
    for index, word in enumerate(words):
        if word.endswith(".py"):
            return index + 1
    for index, word in enumerate(words):
        if word.startswith("--") and is_known(word.partition("=")[0]):
            return index
    return len(words)


def ranks_variable(script: Script) -> int | None:
    """The value of the variable WORLD_SIZE of a script."""
    value = script.variables.get("WORLD_SIZE", "")
    return limited(count_in(value)) if isinstance(value, str) else None


def source_of_stored(name: str, stored: Mapping[str, Any]) -> Source:
    """The stored arguments of a run as flags, without the arguments that have their defaults.

    Args:
        name: the folder, for the report.
        stored: arguments by their names in the program.
    """
    arguments = []
    for argument in sorted(stored):
        value = stored[argument]
        if value is None or value is False or not argument.isidentifier():
            continue
        if value == DEFAULTS.get(argument):
            continue
        items = value if isinstance(value, list | tuple) else [value]
        texts = () if value is True else tuple(plain_text(item) for item in items[:1000])
        arguments.append(Argument(flag_of(argument), texts))
    if stored.get("add_bias_linear") is False:
        arguments.append(Argument("--disable-bias-linear"))
    ranks = stored.get("world_size")
    is_count = type(ranks) is int and 0 < ranks <= MAX_RANKS
    return Source(name, arguments, has_run=True, ranks=ranks if is_count else None)
